"""Instances of the CUTLASS templates: what one computes and how, and its source text. No CUTLASS needed here."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from string import Template

from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.spec import KernelSpec

OPERANDS = {"bf16": "cutlass::bfloat16_t", "f8e4m3": "cutlass::float_e4m3_t"}
OUTPUTS = {"bf16": "cutlass::bfloat16_t", "f32": "float"}
BYTES = {"bf16": 2, "f8e4m3": 1, "f32": 4}
ACTIVATIONS = {"none": "Identity", "silu": "SiLu", "gelu": "GELU", "gelu_tanh": "GELU_taylor"}
GATES = {"silu": "Silu", "gelu": "cutlass::epilogue::thread::GELU<float>"}  # activations of gated products
# Mainloop and tile scheduler; stream-K is a cooperative kernel whose tiles may be split along K.
SCHEDULES = {
    "cooperative": ("TmaWarpSpecializedCooperative", "PersistentScheduler"),
    "pingpong": ("TmaWarpSpecializedPingpong", "PersistentScheduler"),
    "stream_k": ("TmaWarpSpecializedCooperative", "StreamKScheduler"),
}
TARGET = "sm_90"
TEMPLATES = ("library:cutlass_gemm", "library:cutlass_grouped_gemm")


@dataclass(frozen=True)
class Instance:
    """D [M, N] = act(scale * A [M, K] @ B [N, K].T + bias [N] + C [M, N]), accumulated in f32.

    operand: dtype of A and B; output: of C, D and the bias. ``scale``, one f32 on the device, is what f8e4m3 operands
    are to be multiplied by (both scales in one). grouped: rows of A belong to experts, each with its own B.
    """

    operand: str
    output: str
    tile: tuple[int, int, int]  # of M, N, K
    cluster: tuple[int, int] = (1, 1)  # thread blocks along M, N that share loads
    schedule: str = "cooperative"
    activation: str = "none"
    bias: bool = False
    residual: bool = False
    grouped: bool = False
    gated: bool = False

    def __post_init__(self) -> None:
        self._refuse_unknown()
        if self.residual and self.activation != "none":
            raise _refused(
                self, "the residual would be added before the activation", "add it in a kernel after"
            )
        if self.grouped and (self.bias or self.residual or self.activation != "none"):
            raise _refused(self, "grouped products have no epilogue", "apply it in a kernel after")
        if self.gated and (self.bias or self.residual or self.grouped or self.schedule == "stream_k"):
            raise _refused(
                self, "gated products have neither bias nor residual nor groups", "add in a kernel after"
            )
        if self.gated and (self.activation not in GATES or self.operand != "bf16" or self.output != "bf16"):
            raise _refused(
                self, f"gated products are bf16, through {' or '.join(GATES)}", "gate in a kernel after"
            )
        if self.grouped and (self.schedule == "stream_k" or self.operand != "bf16"):
            raise _refused(self, "grouped products are bf16, cooperative or pingpong", "choose one of these")
        if self.schedule != "pingpong" and self.tile[0] % 128:
            raise _refused(self, f"{self.schedule} halves a tile of a multiple of 128 rows", "take pingpong")
        if self.tile[0] % 64 or self.tile[1] % 16 or self.tile[2] * BYTES[self.operand] % 64:
            raise _refused(self, "a tile is multiples of 64 x 16, and of 64 bytes of K", "choose such a tile")

    def _refuse_unknown(self) -> None:
        choices: dict[str, Collection[str]] = {
            "operand": OPERANDS,
            "output": OUTPUTS,
            "activation": ACTIVATIONS,
            "schedule": SCHEDULES,
        }
        for field, known in choices.items():
            if getattr(self, field) not in known:
                raise UnsupportedByTarget(
                    f"CUTLASS kernels have no {field} {getattr(self, field)!r}. Use one of {', '.join(known)}."
                )

    @property
    def _family(self) -> str:
        return "grouped" if self.grouped else "gated" if self.gated else "gemm"

    @property
    def name(self) -> str:
        """A C identifier, equal exactly where instances are."""
        tile, cluster = "x".join(map(str, self.tile)), "x".join(map(str, self.cluster))
        extras = (
            [self.activation] * (self.activation != "none")
            + ["bias"] * self.bias
            + ["residual"] * self.residual
        )
        return "_".join(
            [self._family, self.operand, self.output, tile, f"c{cluster}", self.schedule, *extras]
        )

    def source(self) -> str:
        """The instance as a CUDA C++ translation unit."""
        mainloop, scheduler = SCHEDULES[self.schedule]
        array = "PtrArray" if self.grouped else ""
        fast = "FP8FastAccum" if self.operand == "f8e4m3" else ""
        output = OUTPUTS[self.output]
        # A plain epilogue has no name of its own for pingpong: each of the two groups runs the simple one.
        epilogue = "TmaWarpSpecialized" if self.schedule == "pingpong" and not array else array + mainloop
        return _template(f"{self._family}.cu.in").substitute(
            name=self.name,
            operand=OPERANDS[self.operand], output=output, source=output if self.residual else "void",
            tile_m=self.tile[0], tile_n=self.tile[1], tile_k=self.tile[2],
            cluster_m=self.cluster[0], cluster_n=self.cluster[1],
            mainloop_schedule=f"Kernel{array}{mainloop}{fast}", epilogue_schedule=epilogue,
            scheduler=scheduler, fusion=self._fusion(output), activation=GATES.get(self.activation, ""),
            beta="1.0f" if self.residual else "0.0f",
            bias_argument="args.epilogue.thread.bias_ptr = static_cast<const Output*>(call.bias);" if self.bias else "",
            needs_c=str(self.residual).lower(), needs_bias=str(self.bias).lower(),
        )  # fmt: skip

    def _fusion(self, output: str) -> str:
        """Its name in CUTLASS with types: output, computation, (bias,) source, scalars."""
        act = (
            f"cutlass::epilogue::thread::{ACTIVATIONS[self.activation]}, "
            if self.activation != "none"
            else ""
        )
        kind = "LinComb" + "PerColBias" * self.bias + "EltAct" * bool(act)
        kind = "LinearCombination" if kind == "LinComb" else kind
        return f"{kind}<{act}{output}, float, {f'{output}, ' * self.bias}{output}, float>"

    def config(self) -> dict[str, str | int]:
        """The instance as flat JSON scalars, for the manifest and the tuning data."""
        flat: dict[str, str | int] = {}
        for field, value in asdict(self).items():
            flat[field] = "x".join(map(str, value)) if isinstance(value, tuple) else value
        return flat


def of_spec(spec: KernelSpec) -> Instance:
    """The instance that a spec names by its template and config. Raises ``UnsupportedByTarget`` for another's spec."""
    if spec.template not in TEMPLATES or spec.target != TARGET:
        raise UnsupportedByTarget(
            f"{spec.op}: {spec.template} for {spec.target} is no CUTLASS kernel. They exist for {TARGET} only."
        )
    return of_config(dict(spec.config))


def of_config(config: Mapping[str, object]) -> Instance:
    """The inverse of ``config``, whose values may have become texts. Raises ``UnsupportedByTarget`` where it is not whole."""
    given = {name: str(value) for name, value in config.items()}
    try:
        m, n, k = (int(x) for x in given["tile"].split("x"))
        rows, columns = (int(x) for x in given.get("cluster", "1x1").split("x"))
        operand, output = given["operand"], given["output"]
    except (KeyError, ValueError) as e:
        raise UnsupportedByTarget(
            f"the CUTLASS config {given} is not whole ({e!r}). It takes operand, output, tile (as 128x128x64)."
        ) from e
    return Instance(
        operand, output, (m, n, k), (rows, columns), given.get("schedule", "cooperative"), given.get("activation", "none"),
        given.get("bias") == "True", given.get("residual") == "True", given.get("grouped") == "True",
        given.get("gated") == "True",
    )  # fmt: skip


def table_source(instances: list[Instance]) -> str:
    """The C ABI over instances; their places in the list are their numbers."""
    names = [i.name for i in instances]
    return _template("table.cpp.in").substitute(
        declarations="\n".join(f"extern const cllm::Instance {n};" for n in names),
        places=", ".join(f"&{n}" for n in names),
    )


def _template(name: str) -> Template:
    return Template(files(__package__).joinpath("templates", name).read_text())


def _refused(instance: Instance, why: str, instead: str) -> UnsupportedByTarget:
    return UnsupportedByTarget(f"CUTLASS kernel {instance.name}: {why}; {instead}.")
