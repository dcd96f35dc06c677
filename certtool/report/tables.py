"""Results as tables that read at 80 columns, in ASCII, without colour."""

from __future__ import annotations

from certtool.report.screen import Screen, duration, percent, plain_table
from certtool.training import RunSummary
from certtool.training.estimate import Estimate
from certtool.verification import Radii, VerifyReport
from certtool.verification.recheck import Recheck


def show_verify(screen: Screen, report: VerifyReport) -> None:
    if screen.json:
        screen.document(report.as_json())
        return
    first, data = report.results[0], report.data
    screen.text(
        f"{report.model.name} ({report.model.arch}), {data.images:,} {data.split} images of {data.name}, l-infinity"
    )
    attack = "none" if first.attack is None else f"PGD {first.attack.steps} steps x {first.attack.restarts}"
    screen.text(f"method {first.method}, arithmetic {first.arithmetic}, attack {attack}")
    if report.engine is not None:
        screen.text(f"linear relaxations by {report.engine}")
    screen.text("")
    figures = plain_table("eps", "clean", "attacked", "certified", "rigorous", "seconds")
    counts = plain_table("eps", "certified by", "falsified", "unknown", "wrong", left=2)
    for result in report.results:
        row = (result.clean_accuracy, result.attacked_accuracy, result.certified_accuracy, result.certified_rigorous)
        figures.add_row(str(result.eps), *map(percent, row), f"{result.seconds:.1f}")
        document = result.as_json()
        by = ", ".join(f"{rung} {count}" for rung, count in document["certified_by"].items()) or "-"
        reasons = ", ".join(f"{reason} {count}" for reason, count in document["unknown_reasons"].items())
        unknown = f"{result.count('unknown')} ({reasons})" if reasons else "0"
        counts.add_row(str(result.eps), by, str(result.count("falsified")), unknown, str(result.count("misclassified")))
    screen.table(figures)
    screen.text("")
    screen.table(counts)


def show_image(screen: Screen, report: VerifyReport, classes: tuple[str, ...]) -> None:
    """One image of the user's: the verdict in a sentence for each radius."""
    if screen.json:
        screen.document(report.as_json())
        return
    for result in report.results:
        (image,) = result.images
        name = classes[image.label]
        words = {
            "certified": f"no perturbation up to {result.eps} changes the label `{name}` "
            f"(proven by {image.rung}, grade {image.grade})",
            "falsified": f"a perturbation within {result.eps} changes the label `{name}`",
            "unknown": f"not proven either way at {result.eps} for the label `{name}` ({image.reason})",
            "misclassified": f"the network does not give it the label `{name}`",
        }
        screen.text(f"{image.verdict}: {words[image.verdict]}")


def show_radii(screen: Screen, radii: Radii) -> None:
    """Median, quartiles and a distribution of the largest certified radius."""
    if screen.json:
        screen.document(radii.as_json())
        return
    screen.text(f"largest certified eps by interval bounds, arithmetic {radii.arithmetic}, {len(radii.values)} images")
    screen.text(f"median {float(radii.quantile(0.5)):.4f}, quartiles {float(radii.quantile(0.25)):.4f} "
                f"and {float(radii.quantile(0.75)):.4f}; {radii.wrong} misclassified count as 0\n")  # fmt: skip
    table = plain_table("eps at least", "images", "", left=0)
    table.columns[2].justify = "left"
    for edge, count in radii.distribution():
        table.add_row(f"{edge:.3f}", str(count), "#" * round(50 * count / len(radii.values)))
    screen.table(table)


def show_runs(screen: Screen, runs: list[RunSummary]) -> None:
    if not runs:
        screen.note("no runs here yet; `certtool train tiny_cnn7` makes one")
        return
    table = plain_table("run", "seed", "eps", "epochs", "clean", "certified", "state")
    for run in runs:
        state = "finished" if run.finished else "to resume"
        epochs = f"{run.epochs_done}/{run.epochs}"
        table.add_row(
            run.path,
            str(run.seed),
            run.eps,
            epochs,
            percent(run.clean_accuracy),
            percent(run.certified_accuracy),
            state,
        )
    screen.table(table)


def show_estimate(screen: Screen, found: Estimate) -> None:
    if screen.json:
        screen.document(found.as_json())
        return
    screen.text(
        f"{found.recipe}: {found.parameters:,} parameters, {found.train_images:,} images, "
        f"{found.device}, {found.threads} threads{', compiled' if found.compiled else ''}\n"
    )
    table = plain_table("phase", "steps", "ms a step", "time")
    for phase in found.phases:
        total = duration(phase.steps * phase.seconds_per_step)
        table.add_row(phase.name, f"{phase.steps:,}", f"{1000 * phase.seconds_per_step:.1f}", total)
    table.add_row("test set", str(found.evaluations), "", duration(found.evaluations * found.evaluation_seconds))
    table.add_row("in all", "", "", duration(found.seconds))
    screen.table(table)
    screen.text(f"\nmemory: {found.memory / 2**20:,.0f} MB so far; nothing was written")


def show_recheck(screen: Screen, outcome: Recheck) -> None:
    if screen.json:
        screen.document(outcome.as_json())
        return
    for means, count in outcome.proofs.items():
        if count:
            screen.text(f"recomputed: {count} proofs ({means})")
    screen.text(f"replayed: {outcome.witnesses} witnesses; attacked: {outcome.attacked} certified images")
    if outcome.not_looked_at:
        screen.text(f"not looked at: {outcome.not_looked_at} images (a sample was asked for)")
    for difference in outcome.differences:
        screen.text(f"differs: {difference}")
    screen.text("the certificate holds" if not outcome.differences else "the certificate does NOT hold")
