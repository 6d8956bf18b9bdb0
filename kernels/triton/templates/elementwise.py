"""Functions of f32 elements that Triton itself does not offer, close to the libraries' accuracy."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Odd polynomial near zero, where the quotient would cancel."""
    a = tl.abs(x)
    t = tl.exp(-2.0 * a)
    far = tl.where(x < 0, -1.0, 1.0) * (1.0 - t) / (1.0 + t)
    s = x * x
    near = x * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835)))))
    return tl.where(a < 0.3, near, far)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def relu(x):
    return tl.where(x < 0, 0.0, x)  # NaN stays


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def log1p(x):
    """log(u) corrected by what rounding u = 1 + x lost."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, tl.log(u) * (x / (u - 1.0))))


@triton.jit
def power(a, b):
    """a to the b, also for negative a with whole b."""
    size = tl.exp2(b * tl.log2(tl.abs(a)))
    whole = tl.floor(b) == b
    odd = tl.floor(b * 0.5) * 2.0 != b  # of a whole one
    signed = tl.where(a < 0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
    return tl.where(b == 0.0, 1.0, signed)


@triton.jit
def larger(a, b):
    """NaN where either is NaN."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def smaller(a, b):
    """NaN where either is NaN."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def float_modulo(a, b):
    return a - tl.floor(tl.div_rn(a, b)) * b


@triton.jit
def whole_modulo(a, b):
    """The sign of b, where Triton's has that of a."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def whole_divide(a, b):
    """Rounded down, where Triton rounds towards zero."""
    q = a // b
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def multiply(a, b):
    """For reductions."""
    return a * b
