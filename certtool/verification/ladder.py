"""The ladder of proofs, cheapest first: clean prediction, interval bounds, attack, then linear relaxations.

Each rung sees only the images that no earlier rung decided. Several radii run from the largest down: what is certified
stays certified below, what is falsified stays falsified above, so the sets nest by construction.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from certtool.attack import AttackSettings, attack
from certtool.bounds import Interval, affine_weights, evaluation_weights, graph_of, margin_bounds, propagate
from certtool.bounds.lirpa import installed
from certtool.bounds.rounding import has_rounded_rules, rounded_margins
from certtool.device import in_layout
from certtool.epsilon import Epsilon
from certtool.errors import CertToolError, Exit, InputError, OutsideError
from certtool.verification.images import Images
from certtool.verification.verdicts import EpsResult, Grade, ImageVerdict, Reason, Rung
from certtool.verification.worker import Worker, job_for

Method = Literal["auto", "ibp", "crown-ibp", "crown", "alpha-crown"]
METHODS: tuple[Method, ...] = ("auto", "ibp", "crown-ibp", "crown", "alpha-crown")
RELAXATIONS: dict[Rung, str] = {"crown-ibp": "CROWN-IBP", "crown": "CROWN", "alpha-crown": "alpha-CROWN"}
FIRST_BATCH: dict[Rung, int] = {"crown-ibp": 32, "crown": 4, "alpha-crown": 8}
CACHE = 8 << 20  # bytes of a layer's centers at once: with twice as many a CPU waits for its memory

Progress = Callable[[str, int, int], None]


class Unsound(CertToolError):
    """An attack succeeded where there is a rigorous proof: one of the two is wrong, and both are ours."""

    exit_code = Exit.OUR_BUG

    def __init__(self, index: int, eps: Epsilon, witness: Tensor) -> None:
        super().__init__(
            f"image {index} is certified rigorously at eps {eps}, and yet a perturbation changes its label",
            "this is a bug of certtool; please report it with the witness",
        )
        self.index, self.witness = index, witness


@dataclass(frozen=True)
class LadderSettings:
    method: Method = "auto"
    arithmetic: Grade = "rigorous"
    attack: AttackSettings | None = field(default_factory=AttackSettings)
    attack_certified: int = 0
    batch_size: int = 128
    memory: int = 4 << 30  # bytes that the linear-relaxation worker may use
    time_limit: float | None = None


class Ladder:
    """One network and its images; `climb` takes them up the rungs."""

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        settings: LadderSettings,
        *,
        preprocessing: str | None = None,
        progress: Progress = lambda rung, done, total: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        if any(module.training for module in model.modules()):
            raise InputError("the network, or a part of it, is in training mode", "call `model.eval()` first")
        self.model, self.images, self.settings = model, images, settings
        self.progress, self.warn = progress, warn
        # A copy in channels_last, which convolutions like best, for what needs no gradient.
        self.fast_model = in_layout(copy.deepcopy(model), torch.channels_last)
        self.graph = graph_of(self.fast_model)
        self.weights = evaluation_weights(self.graph)
        self.labels = images.labels
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.arithmetic: Grade = settings.arithmetic
        if settings.arithmetic == "rigorous" and not has_rounded_rules(self.graph):
            warn("this network has an operation without a rounding rule: interval proofs are of grade float32")
            self.arithmetic = "float32"
        if self.arithmetic == "rigorous" and not _is_float32(model):
            warn("this network is not in float32 throughout: interval proofs are of grade float32")
            self.arithmetic = "float32"
        self.rigorous_model = copy.deepcopy(model).double()
        self.rigorous_graph = graph_of(self.rigorous_model)
        self.rigorous_weights = affine_weights(self.rigorous_graph)
        self._refuse_another_function()
        self.widest = self._widest()
        self.rungs = _relaxations(settings.method, warn)
        self.preprocessing = preprocessing
        deadline = None if settings.time_limit is None else time.monotonic() + settings.time_limit
        self.worker = self._worker(deadline) if self.rungs else None

    @torch.no_grad()
    def _refuse_another_function(self) -> None:
        """What torch.fx traced must be what the network computes; a tensor changed under two names breaks that."""
        x = self.images.values(torch.arange(min(4, len(self.labels)))).to(self.device).double()
        called = self.rigorous_model(x.clone())
        traced = propagate(self.rigorous_graph, Interval(x, torch.zeros_like(x))).output.center
        same = torch.isclose(called, traced, rtol=1e-6, atol=1e-9) | ~torch.isfinite(called)
        if called.shape != traced.shape or not bool(same.all()):
            raise InputError(
                "the network computes something else than torch.fx sees in it",
                "in-place operations such as `z += y` on a tensor with two names are the usual cause",
            )

    @torch.no_grad()
    def _widest(self) -> int:
        """Entries of the widest layer of one image."""
        x = self.images.values(torch.tensor([0])).to(self.device).double()
        steps = [step.name for step in self.rigorous_graph.steps]
        layers = propagate(self.rigorous_graph, Interval(x, torch.zeros_like(x)), keep=steps).kept.values()
        return max(z.center.numel() for z in layers if isinstance(z, Interval))

    def _few(self, bytes_an_entry: int) -> int:
        """Images whose layers fit in a CPU's cache together; a GPU takes a whole batch."""
        few = CACHE // (bytes_an_entry * self.widest)
        return max(1, few) if self.device.type == "cpu" else self.settings.batch_size

    def _worker(self, deadline: float | None) -> Worker:
        example = self.images.values(torch.tensor([0]))
        with torch.no_grad():
            classes = self.model(example.to(self.device)).shape[1]
        job = job_for(copy.deepcopy(self.model), self.preprocessing, example, classes)
        return Worker(job, self.settings.memory, deadline)

    def climb(self, radii: Sequence[Epsilon]) -> list[EpsResult]:
        """Results in the order the radii were given."""
        order = sorted(range(len(radii)), key=lambda i: radii[i].value, reverse=True)
        results: dict[int, EpsResult] = {}
        clean = self.clean()
        before: list[ImageVerdict] = clean
        try:
            for i in order:
                results[i] = self._at(radii[i], clean, before)
                before = list(results[i].images)
        finally:
            if self.worker is not None:
                self.worker.close()
        _falsify_above(results, order)
        for result in results.values():
            check_counts(result)
        return [results[i] for i in range(len(radii))]

    # --- rungs -------------------------------------------------------------------------------------------------------

    def clean(self) -> list[ImageVerdict]:
        """Misclassified images are decided for every radius; the others are open."""
        verdicts: list[ImageVerdict] = []
        size = min(self.settings.batch_size, self._few(4))
        for rows in self._batches(torch.arange(len(self.labels)), size, "clean"):
            with torch.no_grad():
                answers = self.fast_model(self.images.values(rows).to(self.device)).argmax(1).cpu()
                right = answers == self.labels[rows]
            for row, correct in zip(rows.tolist(), right.tolist(), strict=True):
                index, label = self.images.indices[row], int(self.labels[row])
                wrong = ImageVerdict(index, label, "misclassified", "clean")
                verdicts.append(ImageVerdict(index, label, "unknown", reason="bound") if correct else wrong)
        return verdicts

    def _at(self, eps: Epsilon, clean: list[ImageVerdict], before: list[ImageVerdict]) -> EpsResult:
        began = time.monotonic()
        verdicts = [old if old.verdict == "certified" else new for old, new in zip(before, clean, strict=True)]
        witnesses: dict[int, Tensor] = {}
        self._intervals(eps, verdicts)
        if self.settings.attack is not None:
            self._attack(eps, verdicts, witnesses, _rows(verdicts, "unknown"))
        for rung in self.rungs:
            self._relaxation(rung, eps, verdicts)
        if self.settings.attack is not None and self.settings.attack_certified:
            certified = _rows(verdicts, "certified")[: self.settings.attack_certified]
            self._attack(eps, verdicts, witnesses, certified)
        return EpsResult(
            eps,
            self.settings.method,
            self.arithmetic,
            self.settings.attack,
            tuple(verdicts),
            witnesses,
            time.monotonic() - began,
        )

    def _intervals(self, eps: Epsilon, verdicts: list[ImageVerdict]) -> None:
        """Everything but what is misclassified; a proof at a larger radius gets its own margin here where it can."""
        rows = [row for row, image in enumerate(verdicts) if image.verdict != "misclassified"]
        for batch in self._batches(torch.tensor(rows, dtype=torch.long), self.settings.batch_size, "ibp"):
            margins = self.interval_margins(batch, self.images.outer(batch, eps.value).interval())
            for row, margin in zip(batch.tolist(), margins.tolist(), strict=True):
                if _positive(margin):
                    verdicts[row] = _certified(verdicts[row], "ibp", self.arithmetic, margin)
                elif verdicts[row].verdict == "unknown":
                    verdicts[row] = replace(verdicts[row], margin=margin if abs(margin) < torch.inf else None)

    @torch.no_grad()
    def interval_margins(self, rows: Tensor, box: Interval) -> Tensor:
        """The least margin of each image over its box, in the ladder's arithmetic."""
        few = self._few(8 if self.arithmetic == "rigorous" else 4)
        parts = (torch.split(t, few) for t in (box.center, box.radius, self.labels[rows]))
        margins = [self._margins(Interval(c, r), y.to(self.device)) for c, r, y in zip(*parts, strict=True)]
        return torch.cat(margins).cpu()

    def _margins(self, box: Interval, labels: Tensor) -> Tensor:
        if self.arithmetic == "rigorous":
            box = Interval(box.center.to(self.device), box.radius.to(self.device))
            return rounded_margins(self.rigorous_graph, box, labels, self.rigorous_weights).min(1).values
        margins = margin_bounds(self.graph, to_float32(box, self.device), labels, self.weights)
        return margins.scatter(1, labels.unsqueeze(1), torch.inf).min(1).values.double()

    def _attack(
        self, eps: Epsilon, verdicts: list[ImageVerdict], witnesses: dict[int, Tensor], rows: list[int]
    ) -> None:
        """On open images, to falsify them; on certified ones, to keep the proofs honest."""
        assert self.settings.attack is not None
        for batch in self._batches(torch.tensor(rows, dtype=torch.long), self.settings.batch_size, "attack"):
            edges = self.images.inner(batch, eps.value)
            x, labels = self.images.values(batch).to(self.device), self.labels[batch].to(self.device)
            found = attack(self.model, x, labels, edges.to(self.device), self.settings.attack)
            for place in found.success.nonzero().flatten().tolist():
                self._falsify(int(batch[place]), eps, found.witness[place].cpu(), verdicts, witnesses)

    def _falsify(
        self, row: int, eps: Epsilon, witness: Tensor, verdicts: list[ImageVerdict], witnesses: dict[int, Tensor]
    ) -> None:
        old = verdicts[row]
        if old.grade == "rigorous":
            raise Unsound(old.index, eps, witness)
        if old.verdict == "certified":
            self.warn(
                f"image {old.index}: the attack beats a float32-grade proof by {old.rung}; it counts as falsified"
            )
        verdicts[row] = ImageVerdict(old.index, old.label, "falsified", "attack")
        witnesses[old.index] = witness

    def _relaxation(self, rung: Rung, eps: Epsilon, verdicts: list[ImageVerdict]) -> None:
        """auto_LiRPA on what is still open. A batch that does not fit into memory is halved, down to one image."""
        assert self.worker is not None
        queue = _rows(verdicts, "unknown")
        size, done, total = FIRST_BATCH[rung], 0, len(queue)
        while queue:
            rows = queue[:size]
            chosen = torch.tensor(rows)
            box = to_float32(self.images.outer(chosen, eps.value).interval(), torch.device("cpu"))
            answer = self.worker.margins(RELAXATIONS[rung], box, self.labels[chosen])
            if answer == "memory" and len(rows) > 1:
                size = len(rows) // 2
                continue
            queue, done = queue[len(rows) :], done + len(rows)
            self.progress(rung, done, total)
            for place, row in enumerate(rows):
                if isinstance(answer, str):
                    verdicts[row] = replace(verdicts[row], reason=_worse(verdicts[row].reason, answer))
                elif _positive(margin := float(answer[place])):
                    verdicts[row] = _certified(verdicts[row], rung, "float32", margin)
            if answer == "engine":
                self.warn(f"auto_LiRPA failed on {len(rows)} images: {self.worker.complaint}")

    def _batches(self, rows: Tensor, size: int, rung: str) -> Iterator[Tensor]:
        """Rows in batches; a batch is told as done when the next one is asked for."""
        for start in range(0, len(rows), size):
            yield rows[start : start + size]
            self.progress(rung, min(start + size, len(rows)), len(rows))


def _relaxations(method: Method, warn: Callable[[str], None]) -> list[Rung]:
    """The linear-relaxation rungs a method climbs to; `auto` does without where auto_LiRPA is not installed."""
    if method == "ibp":
        return []
    rungs: list[Rung] = list(RELAXATIONS)
    if installed() is None:
        from certtool.bounds.lirpa import INSTALL

        if method != "auto":
            raise OutsideError(f"--method {method} needs auto_LiRPA, which is not installed", f"`{INSTALL}`")
        warn(f"auto_LiRPA is not installed: going on without linear relaxations ({INSTALL})")
        return []
    return rungs if method == "auto" else rungs[: rungs.index(method) + 1]


def _is_float32(model: nn.Module) -> bool:
    """The rigorous claim is about binary32 evaluations of binary32 parameters."""
    tensors = (*model.parameters(), *model.buffers())
    return all(tensor.dtype == torch.float32 for tensor in tensors if tensor.is_floating_point())


def _rows(verdicts: list[ImageVerdict], verdict: str) -> list[int]:
    return [row for row, image in enumerate(verdicts) if image.verdict == verdict]


def _positive(margin: float) -> bool:
    """Strictly, and finite: NaN, infinities and ties prove nothing."""
    return 0 < margin < float("inf")


def _certified(old: ImageVerdict, rung: Rung, grade: Grade, margin: float) -> ImageVerdict:
    return ImageVerdict(old.index, old.label, "certified", rung, grade, margin)


def _worse(old: Reason | None, new: Reason) -> Reason:
    """`bound` is the answer of a rung that ran; memory and time say that a rung could not."""
    return new if old in (None, "bound") else old


def to_float32(box: Interval, device: torch.device) -> Interval:
    """The smallest float32 center and radius around it that this arithmetic can name."""
    center = box.center.float()
    radius = (box.radius + (box.center - center.double()).abs()).float()
    radius = torch.nextafter(radius, torch.full_like(radius, torch.inf))
    return Interval(center.to(device), radius.to(device))


def _falsify_above(results: dict[int, EpsResult], order: list[int]) -> None:
    """A witness at a radius lies in every larger box: what was only unknown there is falsified too."""
    witnesses: dict[int, Tensor] = {}
    for i in reversed(order):
        result = results[i]
        witnesses = {**witnesses, **result.witnesses}
        for image in result.images:
            if image.grade == "rigorous" and image.index in witnesses:
                raise Unsound(image.index, result.eps, witnesses[image.index])
        images = tuple(
            ImageVerdict(image.index, image.label, "falsified", "attack")
            if image.verdict in ("unknown", "certified") and image.index in witnesses
            else image
            for image in result.images
        )
        kept = {v.index: witnesses[v.index] for v in images if v.verdict == "falsified"}
        results[i] = replace(result, images=images, witnesses=kept)


def check_counts(result: EpsResult) -> None:
    """What holds on every run, or the run is not reported."""
    for image in result.images:
        proven = image.verdict == "certified"
        assert proven == (image.grade is not None), image
        assert not proven or (image.margin is not None and _positive(image.margin)), image
        assert (image.verdict == "falsified") == (image.index in result.witnesses), image
        assert (image.verdict == "unknown") == (image.reason is not None), image
