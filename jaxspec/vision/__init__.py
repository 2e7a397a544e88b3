"""From an image or a video to rows that a target reads in place of token embeddings: settings, preprocessing, and the towers of the Gemma 4
family. The package knows no requests, slots or caches; it may import media, model, checkpoint and what lies below them. Pillow and PyAV are
imported where an image or a video is opened."""

from jaxspec.vision.config import VisionConfig, vision_config
from jaxspec.vision.images import Images, opened
from jaxspec.vision.preprocessing import Preprocessing
from jaxspec.vision.videos import Videos

__all__ = ["Images", "Preprocessing", "Videos", "VisionConfig", "opened", "vision_config"]
