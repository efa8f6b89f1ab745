"""Discretisation of a diagonal complex state space: zero-order hold and the bilinear transform."""

from typing import Literal

import torch
from torch import Tensor

Discretisation = Literal["zoh", "bilinear"]


def discretise(
    method: Discretisation, real: Tensor, imaginary: Tensor, dt: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Discretise h' = lambda h + x with step dt, for lambda = real + i imaginary, to h_t = a h_(t-1) + b x_t.

    zoh:      a = exp(lambda dt),                            b = (a - 1) / lambda
    bilinear: a = (1 + lambda dt / 2) / (1 - lambda dt / 2),  b = dt / (1 - lambda dt / 2)

    Complex products are written in real arithmetic, because Inductor does not generate code for complex tensors.

    Returns: log |a|, the angle of a, Re b and Im b.
    """
    if method == "zoh":
        log_magnitude, angle = real * dt, imaginary * dt
        magnitude = log_magnitude.exp()
        # exp(z) - 1 without cancellation for small z: expm1(re) cos(im) - 2 sin(im / 2)^2
        minus_one_re = torch.expm1(log_magnitude) * angle.cos() - 2 * (angle / 2).sin().square()
        minus_one_im = magnitude * angle.sin()
        square = real.square() + imaginary.square()
        b_re = (minus_one_re * real + minus_one_im * imaginary) / square
        b_im = (minus_one_im * real - minus_one_re * imaginary) / square
        return log_magnitude, angle, b_re, b_im
    half_re, half_im = real * dt / 2, imaginary * dt / 2
    denominator = (1 - half_re).square() + half_im.square()
    log_magnitude = 0.5 * (((1 + half_re).square() + half_im.square()).log() - denominator.log())
    angle = torch.atan2(half_im, 1 + half_re) + torch.atan2(half_im, 1 - half_re)
    return log_magnitude, angle, dt * (1 - half_re) / denominator, dt * half_im / denominator
