"""Results as tables that read at 80 columns, in ASCII, without colour."""

from __future__ import annotations

from certtool.inspection import Inspection, Layer
from certtool.report.screen import Screen, percent, plain_table
from certtool.training import RunSummary
from certtool.verification import VerifyReport


def show_verify(screen: Screen, report: VerifyReport) -> None:
    if screen.json:
        screen.document(report.as_json())
        return
    screen.text(
        f"{report.name} ({report.arch}) on {report.images:,} {report.split} images of {report.dataset}, l-infinity"
    )
    screen.text(f"method {report.method} (interval bounds), arithmetic {report.arithmetic}")
    screen.text("")
    table = plain_table("eps", "clean", "certified", "proven", "unknown", "wrong", "seconds")
    for result in report.results:
        table.add_row(
            str(result.eps),
            percent(1 - result.misclassified / report.images),
            percent(result.certified / report.images),
            str(result.certified),
            str(result.unknown),
            str(result.misclassified),
            f"{result.seconds:.1f}",
        )
    screen.table(table)


def show_inspection(screen: Screen, name: str, inspection: Inspection) -> None:
    screen.text(
        f"{name}: {inspection.images} images, eps {inspection.eps}, BatchNorm with {inspection.statistics} statistics"
    )
    screen.text("")
    table = plain_table("layer", "kind", "fan-in", "gain", "growth", "width", "log", "active", "unst.", "dead", left=2)
    for layer in inspection.layers:
        table.add_row(*_cells(layer))
    screen.table(table)
    screen.text(f"\nregularisers: tightness {inspection.tightness:.4f}, ReLU balance {inspection.relu:.4f}")
    screen.text("gain: n/2 mean|W|; growth: width over that at the ReLU before;")
    screen.text("log: ln(width over input width); dead: ReLUs that are never active")


def _cells(layer: Layer) -> list[str]:
    def number(value: float | None, form: str = ".3g") -> str:
        return "-" if value is None else format(value, form)

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    return [
        layer.name,
        layer.kind,
        number(layer.fan_in, "d") if layer.fan_in is not None else "-",
        number(layer.difference_gain),
        number(layer.growth),
        number(layer.mean_width),
        number(layer.log_width_ratio, ".2f"),
        share(layer.active),
        share(layer.unstable),
        share(layer.inactive),
    ]


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
