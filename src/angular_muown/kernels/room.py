"""How the work buffer's bytes are spent."""

from collections.abc import Sequence
from dataclasses import dataclass

LANES = 2
CUBLAS_WORKSPACE = 32 * 2**20  # bytes that torch gives cuBLAS for every stream on these GPUs
CUBLAS_SHARE = 4  # it is 5 to 10% faster than a kernel of our own: worth a quarter of the room


@dataclass(frozen=True)
class Room:
    lanes: int
    words: int  # float16, of each lane
    cublas: bool  # whether cuBLAS computes the products with X; its workspaces count


def divide(budget: int, matrices: Sequence[int]) -> Room:
    """Room in `budget` bytes for matrices that take so many words each, the fastest way first: two
    lanes, cuBLAS. A matrix must be whole: where one lane alone is too small, it is exceeded."""
    for lanes in range(LANES, 0, -1):
        workspaces = lanes * CUBLAS_WORKSPACE
        for cublas in (True, False):
            if cublas and CUBLAS_SHARE * workspaces > budget:
                continue
            room = Room(lanes, (budget - cublas * workspaces) // (2 * lanes), cublas)
            if max(matrices) <= room.words:
                return room
    return Room(1, budget // 2, False)
