"""The optimizer step of one rank out of many: what rank 0 computes, packs, launches and sends.

    python benchmarks/ranks.py --shapes gpt124 llama1b --json results/ranks.json

Hidden matrices, float32, random gradients, in one of these placements: `rows` (FSDP2), `columns`
(row-parallel layers), `hsdp` (rows on the 8 ranks of a node, copied to every node), `ddp` (plain
copies, whose ranks share the work where the cost model says that it pays). The process group is
torch's fake one: collectives return at once with arbitrary contents, so `ms` is the step without
the wire. `wire_ms` is modelled: the bytes that the busiest rank sends or receives over the
bandwidths below, which are stated, not measured. With one rank the step is the ordinary one.

`--optimizers dion.Muon` times dion's Muon the same way if the package dion is installed.
"""

import argparse
import gc
import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shapes import SHAPES, Shape, divided
from step_time import peak_above, time_steps
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import angular_muown as library
from angular_muown import Engine
from angular_muown.distributed import agreement, copies, session
from angular_muown.distributed.mesh import RankGroup

HEADER = "optimizer      ranks        ms   host ms  first s shard MiB extra MiB   sent MB  wire ms"
NODE = 8  # ranks that NVLink connects
NVLINK, NETWORK = 1e6 * copies.NVLINK, 1e6 * copies.NETWORK  # bytes per second


class Done:
    """The handle of a collective that is over."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def all_to_all_single(*_: Any, **__: Any) -> Done:
    """Move nothing. The fake group's own refuses to send nothing and receive something, which is
    what a rank does that owns no matrix of a round."""
    return Done()


def stand_in_for_the_others() -> None:
    """Give the answers that other ranks would give: the fake group fills in none."""
    dist.all_to_all_single = all_to_all_single  # pyrefly: ignore

    def all_gather(output: Tensor, part: Tensor, rank_group: RankGroup) -> None:
        output.view(rank_group.size, -1).copy_(part)

    agreement.all_gather = all_gather
    agreement.Agreement._gather = lambda self, mine: [mine] * self.rank_group.size


def mesh_of(placement: str, ranks: int, device: str) -> tuple[DeviceMesh | None, list[Any]]:
    """The mesh of all ranks and the placement on it; no mesh for plain parameters."""
    if placement == "ddp" or ranks == 1:
        return None, []
    if placement == "hsdp":
        shape = (ranks // NODE, NODE)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("copies", "shards"))
        return mesh, [Replicate(), Shard(0)]
    return init_device_mesh(device, (ranks,)), [Shard(("rows", "columns").index(placement))]


def sharded(whole: Shape, mesh: DeviceMesh, kinds: list[Any], device: str) -> DTensor:
    """Rank 0's part of a random matrix, and its place in the whole."""
    sides = list(whole)
    for size, kind in zip(mesh.shape, kinds, strict=True):
        if isinstance(kind, Shard):
            sides[kind.dim] = -(-sides[kind.dim] // size)
    part, stride = torch.randn(sides, device=device), torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        0.02 * part, mesh, kinds, run_check=False, shape=torch.Size(whole), stride=stride
    )


def parameters(
    shapes: list[Shape], ranks: int, device: str, placement: str = "rows"
) -> list[nn.Parameter]:
    mesh, kinds = mesh_of(placement, ranks, device)

    def tensor(shape: Shape) -> Tensor:
        if mesh is None:
            return torch.randn(shape, device=device) * 0.02
        return sharded(shape, mesh, kinds, device)

    params = [nn.Parameter(tensor(shape)) for shape in shapes]
    for p, shape in zip(params, shapes, strict=True):
        p.grad = tensor(shape)
    return params


def make(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "dion.Muon":
        first = params[0]
        mesh = first.device_mesh if isinstance(first, DTensor) else None
        return import_module("dion").Muon(params, distributed_mesh=mesh, use_triton=True)
    return getattr(library, name)(params)


def wire(optimizer: torch.optim.Optimizer, ranks: int) -> dict[str, float]:
    """Bytes per step of the busiest rank, and their modelled time.

    Copies of sharded parameters are on other nodes; all else goes to peers on this node and on
    others in proportion to their numbers.
    """
    if not isinstance(optimizer, Engine) or ranks == 1:
        return {}
    sent = received = seconds = 0.0
    for plan in optimizer.exchange_plan().assignments:
        most_sent, most_received = (float(column.max()) for column in plan.traffic)
        peers = plan.places if plan.places > 1 else plan.copies
        far = max(0, peers - NODE) / max(1, peers - 1)
        gathered = sum(float(plan.gathered(tasks).max()) for tasks in plan.rounds)
        between = (plan.copies - 1) * gathered if plan.places > 1 else 0.0
        rest = max(most_sent, most_received) - between
        seconds += max(rest * (1 - far) / NVLINK, (rest * far + between) / NETWORK)
        sent, received = sent + most_sent, received + most_received
    return {"sent_mb": sent / 1e6, "received_mb": received / 1e6, "wire_ms": 1e3 * seconds}


def measure(
    name: str, shapes: list[Shape], ranks: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    device, cuda = arguments.device, arguments.device.startswith("cuda")
    if ranks > 1:
        # what torchrun would say
        os.environ["LOCAL_WORLD_SIZE"] = str(min(ranks, NODE))
        os.environ["GROUP_WORLD_SIZE"] = str(-(-ranks // NODE))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        stand_in_for_the_others()
    try:
        params = parameters(shapes, ranks, device, arguments.placement)
        optimizer = make(name, params)
        start = time.perf_counter()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        for _ in range(arguments.warmup):
            optimizer.step()
        shard = sum(_local(p).nbytes for p in params)
        held = 2 * shard + sum(
            _local(t).nbytes for s in optimizer.state.values() for t in s.values()
        )
        extra = peak_above(held, optimizer.step, cuda)
        milliseconds, host = time_steps(optimizer.step, arguments.steps, cuda)
        return {
            "optimizer": name,
            "ranks": ranks,
            "ms": milliseconds,
            "host_ms": host,
            "first_step_s": first,
            "extra_mib": extra / 2**20,
            "shard_mib": shard / 2**20,
            **wire(optimizer, ranks),
        }
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def line(result: dict[str, Any]) -> str:
    if "note" in result:
        return f"{result['optimizer']:14} {result['ranks']:>5} {result['note']}"
    wired = f"{result['sent_mb']:9.1f} {result['wire_ms']:8.2f}" if "wire_ms" in result else ""
    return (
        f"{result['optimizer']:14} {result['ranks']:>5} {result['ms']:9.2f} "
        f"{result['host_ms']:9.2f} {result['first_step_s']:8.2f} {result['shard_mib']:9.1f} "
        f"{result['extra_mib']:9.1f} {wired}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt124"])
    parser.add_argument("--divide", type=int, default=1 if cuda else 4)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 8, 64, 512])
    parser.add_argument("--optimizers", nargs="+", default=["AngularMuown"])
    parser.add_argument("--placement", choices=("rows", "columns", "hsdp", "ddp"), default="rows")
    parser.add_argument("--eager", action="store_true", help="without kernels on shards")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.eager:
        session.covers_shards = lambda p, windows, layout, group: False
    cuda = arguments.device.startswith("cuda")
    content: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "settings": {k: v for k, v in vars(arguments).items() if k != "json"},
        "bytes_per_second": {"nvlink": NVLINK, "network": NETWORK},
    }
    print(f"{content['machine']}, torch {torch.__version__}; rank 0 of a fake process group")
    for name in arguments.shapes:
        layers = {} if arguments.layers is None else {"layers": arguments.layers}
        shapes = divided(SHAPES[name](**layers), arguments.divide)
        print(f"\n{name}: {len(shapes)} parameters")
        print(HEADER)
        results = content[name] = []
        for ranks in arguments.ranks:
            for optimizer in arguments.optimizers:
                try:
                    results.append(measure(optimizer, shapes, ranks, arguments))
                except ImportError as error:
                    results.append({"optimizer": optimizer, "ranks": ranks, "note": str(error)})
                print(line(results[-1]), flush=True)
                gc.collect()
                if cuda:
                    torch.cuda.empty_cache()
                if arguments.json:
                    arguments.json.parent.mkdir(parents=True, exist_ok=True)
                    arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
