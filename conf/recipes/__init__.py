"""The built-in recipes, by name."""

from importlib.resources import files
from importlib.resources.abc import Traversable

RECIPES: Traversable = files(__name__)  # also where the code is shipped as a zip


def recipe_names() -> list[str]:
    """List the names of the built-in recipes, sorted."""
    return sorted(p.name.removesuffix(".yaml") for p in RECIPES.iterdir() if p.name.endswith(".yaml"))
