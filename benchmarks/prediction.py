"""How well kernel times are predicted: the model of compilerllm explain against the tuning data that it is fitted to.

  python -m benchmarks.prediction [--target sm_90]

"fitted" has seen every problem; "held out" predicts each from problems of other widths of its family. A table for people,
and one last line of JSON.
"""

import argparse
import json

from compilerllm.explain.predict import Predictor, hold_out, samples, summarise_errors
from compilerllm.explain.text import render_errors
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.kernels.tuning import TunedChooser


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="sm_90")
    target = find_cuda_target(parser.parse_args().target)
    data = TunedChooser.for_target(target).data
    if data is None:
        raise SystemExit(f"there is no tuning data for {target.chip}: run `compilerllm tune` on one")
    found = samples(data)
    predictor = Predictor.of(target, data)
    fitted = summarise_errors((s.family, predictor.time(s.family, s.work), s.us) for s in found)
    held = summarise_errors(hold_out(found, target.bandwidth, target.tflops))
    for what, errors in (("fitted", fitted), ("held out", held)):
        print(f"{what}:\n{render_errors(errors)}\n")
    print(
        json.dumps(
            {
                "target": target.name,
                "fitted": {e.family: round(e.median, 4) for e in fitted},
                "held_out": {e.family: round(e.median, 4) for e in held},
            }
        )
    )


if __name__ == "__main__":
    main()
