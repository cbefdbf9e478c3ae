"""Distillation and patterns that move in the Trainer of Transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        f"tilesparse.recover.trainer needs Transformers and Accelerate (pip install accelerate): {error}"
    ) from error

from .._files import replacing
from ..calibrate.stream import check_distinct, device_of, mask_of_outputs, moved
from ..errors import CheckpointError, InvalidArgumentError
from .distillation import DistillationLoss, outputs_of

FILE = "pattern_schedule.pt"  # in the folder of a checkpoint


class DistillationTrainer(Trainer):  # type: ignore[misc]
    """``Trainer`` whose loss is the difference to a teacher; everything else is as ever.

    Batches need no labels; encoder-decoders do. Evaluation gives the same loss. Batches of one step count
    alike, whatever their number of tokens.

    Args:
        *args: of ``transformers.Trainer``.
        teacher: the dense model, which is put into evaluation mode. It is moved to the device of training, if
            it is on the CPU; otherwise it stays, so that it may have a GPU of its own.
        loss: what is to become small.
        **kwargs: of ``transformers.Trainer``.
    """

    def __init__(self, *args: Any, teacher: nn.Module, loss: DistillationLoss, **kwargs: Any) -> None:
        if kwargs.get("compute_loss_func") is not None:
            raise InvalidArgumentError("compute_loss_func must be None beside a teacher")
        super().__init__(*args, **kwargs)
        check_distinct(self.model, teacher)
        if device_of(teacher).type == "cpu":
            teacher.to(self.args.device)
        self.teacher, self.loss = teacher.eval(), loss
        # It is a mean over the tokens of a batch: the Trainer divides by the number of batches in a step.
        self.model_accepts_loss_kwargs = False
        self.can_return_loss = True  # in evaluation without labels, where label_names=[]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the `DistillationLoss` of a batch, and where asked for the outputs without hidden states."""
        with torch.no_grad():
            # A copy for each model, which may write to its input.
            on_teacher = moved(dict(inputs), device_of(self.teacher), copy=True)
            targets = outputs_of(self.teacher, on_teacher, self.loss)
        mask = mask_of_outputs(self.model, inputs)
        outputs = outputs_of(model, dict(inputs), self.loss)
        loss = self.loss(outputs, targets, mask)
        if not return_outputs:
            return loss
        if not isinstance(outputs, Mapping):
            return loss, (loss, outputs)
        # Evaluation would gather the hidden states of all of its data.
        kept = {name: value for name, value in outputs.items() if name not in ("loss", "hidden_states")}
        return loss, {"loss": loss, **kept}


class PatternCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that steps a schedule of patterns after the optimizer, and saves it with checkpoints.

    A step that the gradient scaler of float16 leaves out is left out here, too. Each checkpoint gets a file
    ``pattern_schedule.pt``, which is read when training resumes from it.

    Args:
        schedule: an object with ``state_dict()`` and ``load_state_dict()``, and mostly ``step()``: without
            one, as `tilesparse.train.MaskSchedule`, it is saved and loaded alone. Make it for the optimizer
            that you give to the Trainer as ``optimizers``.
        scheduler: of the schedule's own rate, stepped along and saved along; None for none.

    Raises:
        CheckpointError: when training resumes, there is no such file, it is damaged, or the folder's
            checkpoint is not the one that is resumed.
    """

    def __init__(self, schedule: Any, *, scheduler: Any = None) -> None:
        for name, one in {"schedule": schedule, "scheduler": scheduler}.items():
            for method in ("state_dict", "load_state_dict"):
                if one is not None and not callable(getattr(one, method, None)):
                    raise InvalidArgumentError(f"{name} must have {method}(), got {type(one).__name__}")
        if schedule is None:
            raise InvalidArgumentError("schedule must not be None")
        self.schedule, self.scheduler = schedule, scheduler

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step schedule and scheduler, while gradients are still there."""
        if getattr(kwargs.get("optimizer"), "step_was_skipped", False):
            return
        for one in (self.schedule, self.scheduler):
            if callable(getattr(one, "step", None)):
                one.step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write ``pattern_schedule.pt`` beside the Trainer's own files."""
        if args.should_save:
            states = {"schedule": self.schedule.state_dict()}
            if self.scheduler is not None:
                states["scheduler"] = self.scheduler.state_dict()
            with replacing(_folder(args, state) / FILE) as file:
                torch.save(states, file)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read that file back where training resumes."""
        if state.global_step == 0:
            return
        checkpoint = _folder(args, state)
        _check_resumed(checkpoint, state)
        try:
            states = torch.load(checkpoint / FILE, map_location="cpu", weights_only=True)
        except Exception as error:  # of many kinds
            raise CheckpointError(f"{checkpoint / FILE}: damaged: {error}") from error
        if set(states) != {"schedule"} | ({"scheduler"} if self.scheduler is not None else set()):
            raise CheckpointError(
                f"{checkpoint / FILE} must be with a scheduler if and only if this callback is"
            )
        self.schedule.load_state_dict(states["schedule"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(states["scheduler"])


def _folder(args: Any, state: Any) -> Path:
    """Return the folder of the Trainer's checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _check_resumed(checkpoint: Path, state: Any) -> None:
    """Raise CheckpointError unless training resumes from this checkpoint."""
    try:
        saved = json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        saved = {}
    same = all(saved.get(name) == getattr(state, name) for name in ("global_step", "log_history"))
    there = (checkpoint / FILE).is_file()
    if not there or not same:
        raise CheckpointError(
            f"{checkpoint / FILE}: {'another run' if there else 'missing'}, while training resumes at step "
            f"{state.global_step}; resume from a checkpoint in output_dir, of which alone callbacks know"
        )
