"""The model card of a trained pipeline."""

from pathlib import Path

from trimtab_common.config import to_flat_dict
from trimtab_common.hub import write_model_card
from trimtab_diffusion.lora import base_name
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline

from .config import PipelineConfig

USAGE = {
    True: """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{base}")
pipeline.load_lora_weights("{repo_id}")""",
    False: """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{repo_id}")""",
}


def write_card(
    path: str | Path,
    pipeline: DDPOStableDiffusionPipeline,
    config: PipelineConfig,
    *,
    name: str,
    trainer: str,
    paper: str,
    repo_id: str | None,
) -> None:
    """Writes a model card (README.md) into the folder `path`; arguments as of `write_model_card`."""
    write_model_card(
        path,
        name=name,
        trainer=trainer,
        paper=paper,
        usage=USAGE[pipeline.use_lora],
        library="diffusers",
        base_model=base_name(pipeline.sd_pipeline),
        settings=to_flat_dict(config),
        repo_id=repo_id,
        tags=["text-to-image", "lora"] if pipeline.use_lora else ["text-to-image"],
    )
