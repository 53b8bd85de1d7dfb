"""The groups that other projects use, too: links to those in the repository's `conf/`. Hydra reads packages only."""
