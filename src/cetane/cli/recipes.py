"""cetane recipes: the recipes that come with cetane."""

from cetane.cli.options import Json
from cetane.cli.output import console, facts, print_json, say


def recipes(json: Json = False) -> None:
    """List the recipes that come with cetane."""
    from cetane.pipeline.request import shipped_recipes

    known = shipped_recipes()
    if json:
        print_json(
            {
                "recipes": [
                    {"name": recipe.name, "group": group, "description": recipe.description}
                    for group, members in known.items()
                    for recipe in members
                ]
            }
        )
        return
    for group, members in known.items():
        facts({recipe.name: recipe.description for recipe in members}, title=group)
        console.print()
    say("next: cetane plan MODEL -r NAME")
