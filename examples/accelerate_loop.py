"""A training loop of your own under accelerate: on one process, or sharded by FSDP2 over several.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py --fsdp2     # on two GPUs
"""

import argparse
import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from made_up import Windows
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from angular_muown import AngularMuown, wsd_schedule

ACCUMULATE = 2


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=None, eos_token_id=None))


def sharding(state_dict_type: str = "SHARDED_STATE_DICT") -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=state_dict_type,
    )


def start(fsdp2: bool) -> Accelerator:
    return Accelerator(
        gradient_accumulation_steps=ACCUMULATE,
        step_scheduler_with_optimizer=False,  # else it steps once for every process
        fsdp_plugin=sharding() if fsdp2 else None,
    )


def main(
    steps: int = 40, fsdp2: bool = False, out: str | None = None, resume: str | None = None
) -> tuple[list[float], torch.nn.Module]:
    """The losses of all steps after the one that was resumed, and the model."""
    accelerator = start(fsdp2)
    model = build()
    optimizer = AngularMuown.for_model(model, lr=0.02)
    scheduler = wsd_schedule(optimizer, steps, warmup=0.1)
    size = 16 // ACCUMULATE // accelerator.num_processes
    data = DataLoader(Windows(32, steps * 32), batch_size=size, drop_last=True)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    if fsdp2 != any(isinstance(p, DTensor) for p in model.parameters()):
        raise SystemExit("accelerate shards on accelerators only: on CPUs it ignores its plug-in")
    if resume:
        accelerator.load_state(resume)
    done, losses = scheduler.scheduler.last_epoch, []
    for batch in accelerator.skip_first_batches(data, done * ACCUMULATE):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()  # does nothing, and kappa stays, until the gradient is whole
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            done += 1
            if out and done == steps // 2:
                accelerator.save_state(out)
            if done == steps:
                break
    return losses, model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fsdp2", action="store_true", help="shard over the processes of torchrun")
    parser.add_argument("--out", default=tempfile.mkdtemp(), help="where half of the run is saved")
    parser.add_argument("--resume", help="a folder that --out has named")
    given = parser.parse_args()
    for step, loss in enumerate(main(given.steps, given.fsdp2, given.out, given.resume)[0]):
        print(step, round(loss, 4))
