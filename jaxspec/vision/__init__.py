"""From an image to rows that a target reads in place of token embeddings: settings, preprocessing, and the towers of the Gemma 4 family.
The package knows no requests, slots or caches; it may import media, model, checkpoint and what lies below them. Pillow is imported where an
image is opened."""

from jaxspec.vision.config import VisionConfig, vision_config
from jaxspec.vision.images import Images, opened
from jaxspec.vision.preprocessing import Preprocessing

__all__ = ["Images", "Preprocessing", "VisionConfig", "opened", "vision_config"]
