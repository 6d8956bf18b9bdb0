"""When requests come."""

import math
import random
from itertools import accumulate


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the start at which ``count`` requests come, ascending, the first at 0.

    rate: requests a second in the mean; inf gives zeros. burstiness: shape of the gamma distribution that gaps are drawn
    from, with mean 1 / rate: 1 makes arrivals a Poisson process, less than 1 bursts, more evens them out.
    """
    if math.isinf(rate):
        return [0.0] * count
    source = random.Random(seed)
    scale = 1.0 / (rate * burstiness)
    gaps = [source.gammavariate(burstiness, scale) for _ in range(count - 1)]
    return list(accumulate(gaps, initial=0.0))[:count]
