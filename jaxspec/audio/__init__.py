"""From a sound to rows that a target reads in place of token embeddings: settings, features, and the towers of the Gemma 4 family. The
package knows no requests, slots or caches; it may import media, model, checkpoint and what lies below them. soundfile and soxr are imported
where a sound is opened."""

from jaxspec.audio.config import AudioConfig, audio_config
from jaxspec.audio.features import Frames, Mel
from jaxspec.audio.sounds import Sounds

__all__ = ["AudioConfig", "Frames", "Mel", "Sounds", "audio_config"]
