"""A measure of recall: needles that attention finds, by distance."""

from cetane.lab.experiment import ArmName
from cetane.lab.needle import LONGEST, recall
from cetane.lab.sides import Findings, Sides, figure, measure_of_both


@measure_of_both("needle")
def needle(sides: Sides) -> dict[ArmName, Findings]:
    """Recall by distance with each side's attention, in a model that searches by content.

    Near ends where the window of a side's full layers ends: the baseline's, else the candidate's.
    Without a window, it ends at a quarter of the context.
    """
    contexts = [side.recipe.cache.context for side in sides.by_arm.values()]
    context = min(LONGEST, *contexts)
    windows = [side.recipe.family.get("full_window") for side in sides.by_arm.values()]
    window = next((size for size in windows if size), context // 4)
    return {
        name: by_distance(
            recall(side.recipe.family, side.recipe.cache.contract, context, window), window
        )
        for name, side in sides.by_arm.items()
    }


def by_distance(recalled: dict[int, float], window: int) -> Findings:
    """The findings of a side, from its share of needles by distance."""
    near = [share for distance, share in recalled.items() if distance < window]
    far = [share for distance, share in recalled.items() if distance >= window]
    note = f"near is less than {window} tokens; a model made by hand"
    return Findings(
        {
            "recall_near": figure("recall_near", sum(near) / len(near), n=len(near), note=note),
            "recall_far": figure("recall_far", sum(far) / len(far), n=len(far), note=note),
        },
        curves={"recall by distance": [(float(d), share) for d, share in recalled.items()]},
    )
