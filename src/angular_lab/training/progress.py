"""What a person sees of a run, and what is written about its speed."""

import sys
import time
from typing import Any

import torch

from angular_lab.config.spec import Spec
from angular_lab.run_folder import RunFolder
from angular_lab.training.loggers import Logger, close_loggers, make_loggers
from angular_lab.training.ranks import Ranks

# Dense bf16 peak in FLOP/s, by the vendor's datasheets; MFU is a share of this.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAKS.items() if key in name), None)


class Progress:
    """Rank 0 writes metrics.jsonl, timing.jsonl and the screen; the others stay silent."""

    def __init__(self, spec: Spec, run: RunFolder, ranks: Ranks, flops_per_token: float) -> None:
        self.spec, self.run, self.ranks, self.flops = spec, run, ranks, flops_per_token
        self.peak = peak_flops(ranks.device)
        self.loggers: list[Logger] = []
        self.terminal = sys.stderr.isatty()

    def start(self, step: int) -> None:
        self.began = self.last = time.perf_counter()
        self.first_step = self.last_step = step
        if self.ranks.first:
            self.loggers = make_loggers(self.spec, self.run, step)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        if not self.ranks.first:
            return
        speed = self._speed(step)
        self.run.append(self.run.metrics_path, metrics)
        self.run.append(self.run.timing_path, {"step": step, **speed})
        for logger in self.loggers:
            logger.log(step, {**metrics, **speed})
        self._show(step, metrics, speed)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, _: object, error: object, traceback: object) -> None:
        close_loggers(self.loggers, self.run, error)
        if self.ranks.first and self.terminal:
            print(file=sys.stderr)

    def _speed(self, step: int) -> dict[str, Any]:
        now = time.perf_counter()
        seconds, taken = now - self.last, step - self.last_step
        self.last, self.last_step = now, step
        rate = taken * self.spec.tokens_per_step / max(seconds, 1e-9)
        speed: dict[str, Any] = {"seconds": now - self.began, "tokens_per_second": rate}
        if self.peak:
            speed["mfu"] = rate * self.flops / (self.peak * self.ranks.world)
        if self.ranks.device.type == "cuda":
            speed["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return speed

    def _show(self, step: int, metrics: dict[str, Any], speed: dict[str, Any]) -> None:
        elapsed, taken = speed["seconds"], step - self.first_step
        remaining = elapsed / max(1, taken) * (self.spec.steps - step)
        loss = metrics["loss"]
        parts = [
            f"step {step}/{self.spec.steps}",
            f"loss {loss:.4f}" if loss is not None else "loss not finite",
            f"val {metrics['val_loss']:.4f}" if "val_loss" in metrics else "",
            *(
                f"average {window:g} {metrics[name]:.4f}"
                for window, name in self.spec.averages.items()
                if name in metrics
            ),
            f"{speed['tokens_per_second'] / 1e3:,.0f}k tokens/s",
            f"MFU {speed['mfu']:.0%}" if "mfu" in speed else "",
            f"{speed['memory_gib']:.1f} GiB" if "memory_gib" in speed else "",
            f"{_clock(remaining)} left",
        ]
        text = "  ".join(part for part in parts if part)
        if self.terminal and "val_loss" not in metrics:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(f"{chr(13) if self.terminal else ''}{text}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
