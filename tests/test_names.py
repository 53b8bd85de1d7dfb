"""Names on disk: what we build parses back, and nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe_ckpt import layout

STEPS = st.integers(min_value=0, max_value=10**25)
UIDS = st.text("0123456789abcdef", min_size=1, max_size=32)
NEAR_NAMES = st.one_of(
    st.text(),
    st.text("global_step_0123456789.abcdef-by+\n ٣１", max_size=40),
    st.builds("global_step_{}{}".format, STEPS, st.text(min_size=1, max_size=5)),
    st.builds("{}global_step_{}".format, st.text(min_size=1, max_size=5), STEPS),
)


@given(STEPS)
def test_step_name_parses_back(step):
    assert layout.parse_step_name(layout.build_step_name(step)) == step


@given(STEPS, UIDS)
def test_staging_and_displaced_names_parse_back_and_stay_apart(step, uid):
    staging, displaced = layout.build_staging_name(step, uid), layout.build_displaced_name(step, uid)
    assert layout.parse_staging_name(staging) == layout.parse_displaced_name(displaced) == (step, uid)
    assert layout.parse_displaced_name(staging) is layout.parse_staging_name(displaced) is None
    assert layout.parse_step_name(staging) is layout.parse_step_name(displaced) is None


@given(NEAR_NAMES)
def test_step_name_parses_only_what_would_be_built(name):
    step = layout.parse_step_name(name)
    assert step is None or layout.build_step_name(step) == name


@given(NEAR_NAMES)
def test_staging_and_displaced_names_parse_only_what_would_be_built(name):
    staging, displaced = layout.parse_staging_name(name), layout.parse_displaced_name(name)
    assert staging is None or layout.build_staging_name(*staging) == name
    assert displaced is None or layout.build_displaced_name(*displaced) == name


@pytest.mark.case("C104")
@pytest.mark.parametrize(
    "name",
    [
        "global_step_100.backup",
        "foo-global_step_100",
        "global_step_",
        "global_step_-5",
        "global_step_+5",
        "global_step_1e3",
        "global_step_007",
        "global_step_1_0",
        "global_step_１０",
        "global_step_٣",
        "global_step_7\n",
        "\nglobal_step_7",
        " global_step_7",
        "global_step_7/",
        "/a/global_step_7",
        "Global_step_7",
        "global_step_7.5",
        "global_step_" + "9" * 5000,
    ],
)
def test_step_name_is_none_for_other_names(name):
    assert layout.parse_step_name(name) is None


def test_step_name_refuses_a_negative_step():
    with pytest.raises(ValueError, match="a step is an integer >= 0, found -1"):
        layout.build_step_name(-1)


@pytest.mark.case("C201", "C202")
@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("10", 10),
        ("10\n", 10),
        (" 10 ", 10),
        ("10\r\n", 10),
        ("\t0\n\n", 0),
        ("1" * 25, int("1" * 25)),
        ("", None),
        ("abc", None),
        ("10.0", None),
        ("-1", None),
        ("+1", None),
        ("\0\0", None),
        ("10\0", None),
        ("\ufeff10", None),
        ("release", None),
        ("1_0", None),
        ("１０", None),
        ("٣", None),
        ("010", None),
        ("10 20", None),
        ("10\n20", None),
        ("10\x0b", None),
        ("10\u2028", None),
        ("9" * 5000, None),
    ],
)
def test_tracker_parses_bare_decimals_only(text, step):
    assert layout.parse_tracker(text) == step


@given(st.text("0123456789 \t\n\r+-_.eE\0１٣\ufeff", max_size=12))
def test_tracker_parses_to_a_step_whose_digits_it_holds(text):
    step = layout.parse_tracker(text)
    assert step is None or text.strip(" \t\r\n") == str(step)


@given(st.sampled_from([layout.TRACKER, layout.RUN_RECORD, layout.LEASE, layout.ARCHIVING]), st.uuids())
def test_temporary_name_is_the_one_of_a_replaced_file(name, uid):
    assert layout.is_temporary_name(f"{name}.{uid.hex}.tmp")
    assert not any(map(layout.is_temporary_name, (name, f"x{name}.{uid.hex}.tmp", f"{name}.{uid.hex}", f"{name}.tmp")))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt", "data_0.pt"], None),
        (["model_world_size_1_rank_0.pt", "data.pt"], None),
        (["model_world_size_2_rank_1.pt", "data_0.pt"], "of 2 model shards the ones of ranks [0] are missing"),
        (["model_world_size_1_rank_0.pt", "model_world_size_2_rank_1.pt", "data_0.pt"], "several world sizes"),
        (["model_world_size_1_rank_0.pt"], "it has no data_<dp_rank>.pt"),
        (["index.json", "model_world_size_1_rank_0.pt", "data_0.pt"], "a save that was cut short"),
        ([], "it has no manifest.json"),
        (["config.json", "model.safetensors"], "it has no manifest.json"),
    ],
)
def test_foreign_directory_is_complete_or_says_what_is_missing(names, problem):
    found = layout.find_foreign_problem(names)
    assert found is None if problem is None else problem in found
