"""How the work buffer's bytes are spent."""

from collections.abc import Sequence
from dataclasses import dataclass

# Ways to spend it, the fastest first: lanes, and whether cuBLAS computes the products with X. With
# cuBLAS a third lane is slower. Without it, which is how small models go, a lane costs nothing, and
# four keep the GPU filled (docs/performance.md has the times).
WAYS = ((2, True), (4, False), (2, False), (1, True), (1, False))
CUBLAS_WORKSPACE = 32 * 2**20  # bytes that torch gives cuBLAS for every stream on these GPUs
CUBLAS_SHARE = 4  # it is 5 to 10% faster than a kernel of our own: worth a quarter of the room


@dataclass(frozen=True)
class Room:
    lanes: int
    words: int  # float16, of each lane
    cublas: bool  # whether cuBLAS computes the products with X; its workspaces count


def divide(budget: int, matrices: Sequence[int]) -> Room:
    """Room in `budget` bytes for matrices that take so many words each. A matrix must be whole:
    where one lane alone is too small, the budget is exceeded."""
    for lanes, cublas in WAYS:
        workspaces = cublas * lanes * CUBLAS_WORKSPACE
        room = Room(lanes, (budget - workspaces) // (2 * lanes), cublas)
        if CUBLAS_SHARE * workspaces <= budget and max(matrices) <= room.words:
            return room
    return Room(1, budget // 2, False)
