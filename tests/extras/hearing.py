"""Tiny random networks that hear, sounds for them, and the oracle: transformers' `generate` with
the features of all sounds at once, one prompt at a time."""

import io
import json
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from checkpoints import byte_tokenizer
from seeing import Seer

from benchmarks.models import GQA, randomise

SIZES = dict(num_mel_bins=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
TEXT = dict(GQA, vocab_size=272)
TOKENS = ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>", "<asr_text>")
AUDIO = 261  # <|audio_pad|>
NETWORKS: dict[str, Callable] = {
    "qwen3-asr": lambda: transformers.Qwen3ASRConfig(
        text_config=dict(TEXT, model_type="qwen3", head_dim=8), audio_token_id=AUDIO,
        pad_token_id=259, eos_token_id=257, audio_config=dict(
            num_mel_bins=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32,
            d_model=16, n_window_infer=200, output_dim=32, downsample_hidden_size=8)),
    "glm-asr": lambda: transformers.GlmAsrConfig(
        text_config=dict(TEXT, model_type="llama"), audio_token_id=AUDIO,
        audio_config=dict(SIZES, intermediate_size=64, max_position_embeddings=200)),
    "voxtral": lambda: transformers.VoxtralConfig(
        text_config=dict(TEXT, model_type="llama", head_dim=8), audio_token_id=AUDIO,
        audio_config=dict(SIZES, intermediate_size=64, max_source_positions=40)),
}
PROCESSORS = {"qwen3-asr": ("Qwen3ASRFeatureExtractor", "Qwen3ASRProcessor"),
              "glm-asr": ("WhisperFeatureExtractor", "GlmAsrProcessor")}
TEMPLATE = """{% for m in messages %}<s>{{ m.role }}:{% if m.content is string %}{{ m.content }}{%
else %}{% for p in m.content %}{% if p.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{%
else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% if not loop.last or add_generation_prompt %}
<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"""


def make_hearing(name: str, folder: Path) -> Path:
    """With a tokenizer that has placeholders, and the files of a processor that is transformers'
    alone: Voxtral's needs another package for its tokens."""
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForMultimodalLM.from_config(NETWORKS[name]())
    randomise(model)
    with torch.no_grad():  # words count beside sounds
        model.get_input_embeddings().weight *= 10
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS[:3]]})
    tokenizer.add_tokens([TOKENS[3]])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    names = dict(zip(("audio_bos_token", "audio_token", "audio_eos_token"), TOKENS, strict=False))
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(
        extra_special_tokens=names)))
    if name in PROCESSORS:
        extractor, processor = PROCESSORS[name]
        getattr(transformers, extractor)(feature_size=16).save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(dict(
            processor_class=processor, audio_token=TOKENS[1])))
    return folder


class Listener(Seer):
    """The oracle of one checkpoint; it also makes sounds and prompts for it."""

    kind, auto = "audio", transformers.AutoModelForMultimodalLM

    def sound(self, seconds: float, seed: int) -> dict:
        """Of random features, in the form that the network's own processor has: padded."""
        frames = int(100 * seconds)
        size = 100 if self.name == "qwen3-asr" else 80
        whole = -(-frames // size) * size
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(1, 16, whole, generator=generator)
        if self.name == "voxtral":
            return dict(input_features=features.view(16, -1, size).transpose(0, 1).contiguous())
        return dict(input_features=features,
                    input_features_mask=(torch.arange(whole) < frames)[None].long())


def wav(samples: np.ndarray, rate: int = 16000, channels: int = 1) -> bytes:
    """A file of 16 bits, all of whose channels are the same."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, 2, rate, 0, "NONE", ""))
        writer.writeframes(np.repeat(samples * 2 ** 15, channels).astype("<i2").tobytes())
    return file.getvalue()


def speech(seed: int, seconds: float = 1.0, rate: int = 16000) -> np.ndarray:
    """Two tones that change, which are no speech but a sound."""
    time, rng = np.arange(int(seconds * rate)) / rate, np.random.default_rng(seed)
    tones = sum(np.sin(2 * np.pi * (pitch + 30 * np.sin(3 * time)) * time)
                for pitch in rng.uniform(100, 900, 2))
    return (tones * 2 ** 13).astype(np.int16).astype(np.float32) / 2 ** 15  # as a file holds it
