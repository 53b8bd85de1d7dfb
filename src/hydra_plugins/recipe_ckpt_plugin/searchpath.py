"""Makes `defaults: [checkpoint: default]` work in every project of an environment that this package is installed in."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class RecipeCkptSearchPath(SearchPathPlugin):
    """Puts the group `checkpoint` and its schema last on the search path: a project's own options win over these."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from recipe_ckpt.hydra_side import LIBRARY, register_schemas

        register_schemas(LIBRARY)
        search_path.append(provider="recipe_ckpt", path="pkg://recipe_ckpt.conf")
