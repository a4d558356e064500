import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F

from experiments.black_2023_ddpo.shapes import CAPTIONS, draw
from experiments.patch_vae import patch_autoencoder, patches, principal_components

Fitted = tuple[AutoencoderKL, Tensor, Tensor, Tensor]


def shapes(count: int, seed: int = 0) -> Tensor:
    """Renders coloured shapes of 16x16 pixels, from -1 to 1."""
    return 2 * draw(torch.arange(count) % len(CAPTIONS), torch.Generator().manual_seed(seed)) - 1


@pytest.fixture(scope="module", params=[(16, 6), (18, 7), (24, 10), (32, 12)], ids=lambda pair: f"{pair[0]} pixels")
def fitted(request: pytest.FixtureRequest) -> Fitted:
    """Fits a VAE to shapes, blown up to a size, with a number of components."""
    size, channels = request.param
    images = shapes(256) + 0.1 * torch.randn(256, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    images = F.interpolate(images, (size, size), mode="bilinear").clamp(-1, 1)
    mean, basis = principal_components(images, channels)
    return patch_autoencoder(mean, basis, size), mean, basis, images


def put_together(cut: Tensor) -> Tensor:
    """Reassembles what `patches` cut, pixel by pixel."""
    images = torch.empty(len(cut), 3, 2 * cut.shape[1], 2 * cut.shape[2])
    for place in range(4):
        images[:, :, place // 2 :: 2, place % 2 :: 2] = cut[..., 3 * place : 3 * place + 3].permute(0, 3, 1, 2)
    return images


def test_patches_put_together_are_the_picture():
    images = shapes(4)
    assert torch.equal(put_together(patches(images)), images)


def test_encoder_gives_principal_components_of_variance_one(fitted: Fitted):
    vae, _, basis, images = fitted
    with torch.no_grad():
        latents = vae.encode(images).latent_dist
    rows = latents.mode().permute(0, 2, 3, 1).flatten(0, 2).double()
    torch.testing.assert_close(rows.T @ rows / len(rows), torch.eye(basis.shape[1]).double(), atol=5e-3, rtol=0)
    assert latents.std.max() < 1e-6


def test_decoder_is_the_mean_and_the_basis(fitted: Fitted):
    vae, mean, basis, images = fitted
    side = images.shape[-1] // 2
    latents = torch.randn(8, basis.shape[1], side, side, generator=torch.Generator().manual_seed(0))
    expected = put_together(latents.permute(0, 2, 3, 1) @ basis.T + mean)
    is_inside = (expected.abs() < 1.5).all(1, keepdim=True).expand_as(expected)
    with torch.no_grad():
        torch.testing.assert_close(vae.decode(latents).sample[is_inside], expected[is_inside], atol=3e-3, rtol=0)


def test_six_of_twelve_components_keep_most_of_a_picture():
    mean, basis = principal_components(shapes(256), 6)
    vae, images = patch_autoencoder(mean, basis), shapes(64, seed=1)
    with torch.no_grad():
        again = vae.decode(vae.encode(images).latent_dist.mode()).sample
    assert 10 * torch.log10(4 / (again - images).square().mean()) > 25  # dB
