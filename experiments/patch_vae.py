"""A VAE that needs no training: the weights of diffusers' AutoencoderKL are set to map patches to PCA and back."""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

PATCH = 2
PLACES = [(row, column) for row in range(PATCH) for column in range(PATCH)]  # the pixels of a patch
WIDTH, GROUPS = 32, 2  # channels, and groups of the group norm: each normalizes half of the channels

BALLAST = 1000.0  # each half holds plus and minus this, so large that an image hardly changes its statistics
SLOPE = 20.0  # silu(SLOPE x) is SLOPE x where x >= 1, and 0 where x <= -1
LIFT = 3.0  # moves pixels from [-1, 1] to where silu is linear
SHUT = 40.0  # moves pixels to where silu is zero

# Channels. The first half of the decoder counts columns and rows, the second holds the pixels of each patch.
COLUMN, ROW, OLD_COLUMN, OLD_ROW = 0, 1, 2, 3
PIXELS, COUNTERWEIGHTS = 16, (28, 29)
BALLASTS = {14: BALLAST, 15: -BALLAST, 30: BALLAST, 31: -BALLAST}
LEFT, ABOVE, CENTRE = (1, 0), (0, 1), (1, 1)  # taps of a 3x3 kernel


def patches(images: Tensor) -> Tensor:
    """Cuts images [B, 3, H, W] into patches [B, H / 2, W / 2, 12]: the three colours of each pixel in turn."""
    pixels = images.unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH))  # [B, 3, H / 2, 2, W / 2, 2]
    return pixels.permute(0, 2, 4, 3, 5, 1).flatten(3)


def principal_components(images: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Computes the principal components of the patches of images [B, 3, H, W].

    Returns:
        The mean [12], and a basis [12, channels]. Its columns are orthogonal, and the length of each is the standard
        deviation along it, in descending order.
    """
    rows = patches(images).flatten(0, 2).double()
    mean = rows.mean(0)
    variances, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
    vectors = vectors.flip(1)[:, :channels]
    vectors = vectors * torch.where(vectors.sum(0) < 0, -1.0, 1.0)  # eigh leaves the signs open
    return mean.float(), (vectors * variances.flip(0)[:channels].sqrt()).float()


@torch.no_grad()
def patch_autoencoder(mean: Tensor, basis: Tensor, size: int = 16) -> AutoencoderKL:
    """Builds an AutoencoderKL of 2x2 patches: pixels = mean + basis latents, for images of size x size pixels.

    Latents are [B, C, H / 2, W / 2]; pixels are from -1 to 1.

    The layers of an AutoencoderKL are not linear, but the whole is. Unused residual branches are zero. Large constants
    determine the statistics of the norms. silu(x) - silu(-x) = x, and silu is linear far from zero. Nearest-neighbour
    upsampling and a convolution cannot tell the four pixels of a patch apart. The decoder therefore counts rows and
    columns from the border, where a convolution sees the padding, and selects each pixel by its count.

    Args:
        mean: The mean of the patches, [12].
        basis: Orthogonal columns, [12, C].
        size: Height and width of the images, even.

    Returns:
        The autoencoder, in eval mode.
    """
    vae = AutoencoderKL(
        latent_channels=basis.shape[1],
        block_out_channels=(WIDTH, WIDTH),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=max(1, math.ceil(size / 4 - 0.5) - 3),  # of the blocks that count, the middle one has two
        norm_num_groups=GROUPS,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        sample_size=size,
    ).eval()
    for parameter in vae.parameters():
        parameter.zero_()
    _set_encoder(vae.encoder, mean, basis)
    _set_decoder(vae.decoder, mean, basis)
    _make_norms_multiply(vae.encoder, torch.zeros(1, 3, size, size))
    _make_norms_multiply(vae.decoder, torch.zeros(1, basis.shape[1], size // 2, size // 2))
    return vae


def _set_encoder(encoder: Any, mean: Tensor, basis: Tensor) -> None:
    channels = basis.shape[1]
    analysis = (basis / basis.square().sum(0)).T
    for colour in range(3):
        encoder.conv_in.weight[(colour, colour, *CENTRE)] = 1
    gather = encoder.down_blocks[0].downsamplers[0].conv
    _add_ballast(gather)
    # Each component and its negative are in the same half, whose mean then does not depend on the image.
    first = torch.tensor([WIDTH // GROUPS * (index // 7) + 2 * (index % 7) for index in range(channels)])
    for sign, rows in ((1, first), (-1, first + 1)):
        gather.bias[rows] = -sign * analysis @ mean
        for place, (row, column) in enumerate(PLACES):
            gather.weight[rows, :3, row, column] = sign * analysis[:, 3 * place : 3 * place + 3]
        for index in range(channels):
            encoder.conv_out.weight[(index, int(rows[index]), *CENTRE)] = sign / SLOPE
    encoder.conv_out.bias[channels:] = -30  # the logarithm of the variance: no noise


def _set_decoder(decoder: Any, mean: Tensor, basis: Tensor) -> None:
    pixels = slice(PIXELS, PIXELS + len(mean))
    _add_ballast(decoder.conv_in)
    decoder.conv_in.bias[[COLUMN, ROW]] = 1
    decoder.conv_in.weight[(pixels, slice(None), *CENTRE)] = basis
    decoder.conv_in.bias[pixels] = mean + LIFT
    for index in COUNTERWEIGHTS:  # keep the mean of the half independent of the image
        decoder.conv_in.weight[(index, slice(None), *CENTRE)] = -basis.sum(0) / len(COUNTERWEIGHTS)

    for block in (*decoder.mid_block.resnets, *decoder.up_blocks[0].resnets):
        _count_two_further(block)

    upsample = decoder.up_blocks[0].upsamplers[0].conv
    _add_ballast(upsample)
    for index in (*range(pixels.start, pixels.stop), *COUNTERWEIGHTS):
        upsample.weight[(index, index, *CENTRE)] = 1
    for place, (row, column) in enumerate(PLACES):
        for colour in range(3):
            index = PIXELS + 3 * place + colour
            _open_at(upsample, index, COLUMN, LEFT, is_second=bool(column))
            _open_at(upsample, index, ROW, ABOVE, is_second=bool(row))
            decoder.conv_out.weight[(colour, index, *CENTRE)] = 1 / SLOPE
    decoder.conv_out.bias[:] = -LIFT


def _count_two_further(block: Any) -> None:
    """Sets each count to 1 + the count of the previous neighbour (1 at the border), twice, so that it grows by two."""
    for convolution in (block.conv1, block.conv2):
        for count, before in ((COLUMN, LEFT), (ROW, ABOVE)):
            convolution.weight[(count, count, *before)] = 1 / SLOPE
            convolution.bias[count] = 1
    _add_ballast(block.conv1)
    for count, old in ((COLUMN, OLD_COLUMN), (ROW, OLD_ROW)):
        block.conv1.weight[(old, count, *CENTRE)] = 1 / SLOPE
        block.conv2.weight[(count, old, *CENTRE)] = -1 / SLOPE  # the block adds its input to the result


def _open_at(upsample: nn.Conv2d, channel: int, count: int, before: tuple[int, int], *, is_second: bool) -> None:
    """Lowers `channel` by SHUT except at the second (or the first) pixel of each pair.

    The second pixel has the count of the previous neighbour; the first has that count plus one.
    """
    sign = -1 if is_second else 1
    upsample.weight[(channel, count, *CENTRE)] = sign * SHUT
    upsample.weight[(channel, count, *before)] = -sign * SHUT
    if not is_second:
        upsample.bias[channel] -= SHUT


def _add_ballast(convolution: nn.Conv2d) -> None:
    for channel, value in BALLASTS.items():
        convolution.bias[channel] = value


def _make_norms_multiply(network: nn.Module, example: Tensor) -> None:
    """Sets each group norm of `network`, in forward order, to multiply its input by SLOPE."""

    def set_weights(norm: nn.GroupNorm, inputs: tuple[Tensor]) -> None:
        groups = inputs[0].transpose(0, 1).reshape(norm.num_groups, -1).double()
        deviation = (groups.var(1, correction=0) + norm.eps).sqrt()
        channels_per_group = norm.num_channels // norm.num_groups
        norm.weight.copy_((SLOPE * deviation).repeat_interleave(channels_per_group))
        norm.bias.copy_((SLOPE * groups.mean(1)).repeat_interleave(channels_per_group))

    handles = [
        module.register_forward_pre_hook(set_weights)
        for module in network.modules()
        if isinstance(module, nn.GroupNorm)
    ]
    network(example)
    for handle in handles:
        handle.remove()
