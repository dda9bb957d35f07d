"""Texts about sounds: token for token what transformers writes, from features that its processors
made, and from samples and WAV files. The oracle makes its own features."""

import base64

import numpy as np
import pytest
import torch
import transformers
from architectures import Made
from checkpoints import assert_same_text
from hearing import AUDIO, NETWORKS, PROCESSORS, Listener, make_hearing, speech, wav

from nanoserve import LLM, SamplingParams
from nanoserve_extras.multimodal.multimodal import Multimodal
from nanoserve_extras.multimodal.multimodal_inputs import read_sound

MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
PLACE = "<|audio_start|><|audio_pad|><|audio_end|>"


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("hearing"), make_hearing)


def start(folder, **options) -> LLM:
    return LLM(folder, **dict(dtype="float32", num_gpu_blocks_override=64,
                              limit_mm_per_prompt={"audio": 2}, encoder_cache_tokens=60) | options)


@pytest.fixture(scope="module")
def engine(folders):
    with start(folders["qwen3-asr"]) as llm:
        yield llm


@pytest.mark.parametrize("name", NETWORKS)
def test_a_text_about_sounds_is_what_transformers_writes(folders, name):
    """The same words about one sound, another one as long, two sounds, and none."""
    one = Listener(name, folders[name])
    prompts = [one.prompt(one.sound(1.4, 1)), one.prompt(one.sound(1.4, 2)),
               one.prompt(one.sound(0.7, 3), one.sound(1.1, 4)), one.prompt()]
    texts = [one.generate(prompt, MAX_TOKENS) for prompt in prompts]
    assert texts[0][0] != texts[1][0]  # they do listen
    # Blocks for the longest text and one more: others are preempted.
    blocks = 2 + (max(len(one["prompt_token_ids"]) for one in prompts) + MAX_TOKENS) // 5
    for options in (dict(max_num_batched_tokens=7),  # chunks that end in the middle of sounds
                    dict(num_gpu_blocks_override=blocks, block_size=5, async_scheduling=True)):
        with start(folders[name], encoder_cache_tokens=200, **options) as llm:
            for attempt in ("first", "cached"):
                outs = llm.generate(prompts, GREEDY, use_tqdm=False)
                for out, text in zip(outs, texts, strict=True):
                    assert_same_text(out.outputs[0].token_ids, *text, f"{name} {attempt}")
            assert llm.extra(Multimodal).encoder.num_runs == 4
        assert len(options) == 1 or any(out.metrics.num_preemptions for out in outs)


@pytest.mark.parametrize("name", PROCESSORS)
def test_samples_and_files_become_what_the_processor_makes_of_them(folders, tmp_path, name):
    samples, file = speech(1), tmp_path / "said.wav"
    file.write_bytes(wav(samples, channels=2))
    url = f"data:audio/wav;base64,{base64.b64encode(wav(samples)).decode()}"
    processor = transformers.AutoProcessor.from_pretrained(folders[name])
    model = transformers.AutoModelForMultimodalLM.from_pretrained(folders[name]).eval()
    with start(folders[name], encoder_cache_tokens=400) as llm:
        for sounds in ([samples], [samples, speech(2)]):
            if len(sounds) == 1:
                made = processor.apply_transcription_request(audio=samples, prompt="Who?")
                prompt = llm.inputs.transcription((samples, 16000), None, "Who?")
            else:  # the processors take a sound for each text
                made = [processor(text=f"Hi{PLACE}", audio=sound) for sound in sounds]
                made = {key: torch.cat([one[key] for one in made], int(key == "input_ids"))
                        for key in made[0] if key != "attention_mask"}
                prompt = {"prompt": 2 * f"Hi{PLACE}", "multi_modal_data": {
                    "audio": [(sound, 16000) for sound in sounds]}}
            with torch.no_grad():
                want = model.generate(**made, max_new_tokens=MAX_TOKENS, do_sample=False)
            want = want[0, made["input_ids"].shape[1]:].tolist()
            forms = [prompt["multi_modal_data"]["audio"]]
            for audio in forms if len(sounds) == 2 else [*forms, file, url, wav(samples)]:
                prompt["multi_modal_data"] = {"audio": audio}
                [out] = llm.generate(prompt, GREEDY, use_tqdm=False)
                assert out.prompt_token_ids == made["input_ids"][0].tolist()
                assert out.outputs[0].token_ids == want, audio


def test_a_chat_with_sounds_is_the_prompt_that_its_template_writes(engine):
    data = base64.b64encode(wav(speech(1))).decode()
    [want] = engine.generate({"prompt": f"<s>user:Hi{PLACE}?<|end|><s>assistant:",
                              "multi_modal_data": {"audio": (speech(1), 16000)}}, GREEDY)
    for part in (dict(type="input_audio", input_audio=dict(data=data, format="wav")),
                 dict(type="audio_url", audio_url=dict(url=f"data:audio/wav;base64,{data}")),
                 dict(type="audio", audio=(speech(1), 16000))):
        [out] = engine.chat([dict(role="user", content=[
            dict(type="text", text="Hi"), part, dict(type="text", text="?")])], GREEDY)
        assert out.prompt_token_ids == want.prompt_token_ids
        assert out.outputs[0].token_ids == want.outputs[0].token_ids


@pytest.mark.parametrize("rate", [8000, 22050, 48000])
def test_another_rate_keeps_all_tones_that_both_can_hold(rate):
    """1,000 Hz are the same at any rate; 9,000 Hz are too high for 16,000 samples a second."""
    def tones(rate, *pitches):
        time = np.arange(rate) / rate
        return sum(np.sin(2 * np.pi * pitch * time) for pitch in pitches)

    given = tones(rate, 1000, *[9000] * (rate > 18000))
    assert np.abs(read_sound((given, rate), 16000) - tones(16000, 1000)).max() < 1e-4


BAD = [(b"ID3 is an mp3", "a WAV file .*begin"), (7, "a sound must be"),
       ("a.wav", "must be data:"),
       ((np.zeros(0), 16000), "numbers"), ((np.zeros((2, 2, 9)), 16000), "got .2, 2, 9. numbers"),
       ((np.zeros(9), 0), "a sound must be"), ((np.zeros(9), "fast"), "a sound must be"),
       ((np.array([np.nan]), 16000), "nan"), ((["a"], 16000), "a sound must be"),
       ((np.zeros(601 * 16000, dtype=np.int8), 16000), "600 seconds"),
       ({"input_features": torch.zeros(3)}, "the tower can't read this audio"),
       ({"pixel_values": torch.zeros(3)}, "input_features"),
       ((np.zeros(16000 * 5), 16000), "65 tokens")]


@pytest.mark.parametrize(("sound", "says"), BAD, ids=[says for _, says in BAD])
def test_what_is_no_sound_is_named_and_nothing_is_lost(engine, sound, says):
    with pytest.raises(ValueError, match=f"prompt 1: .*{says}"):
        engine.generate(["Hi", {"prompt": PLACE, "multi_modal_data": {"audio": sound}}], GREEDY,
                        use_tqdm=False)
    assert len(engine.generate("Hi", GREEDY, use_tqdm=False)) == 1


def test_who_does_not_hear_is_refused_in_words(folders, checkpoints, engine, tmp_path):
    whisper = transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"])
    whisper.save_pretrained(tmp_path)
    for folder, limits, says in (
            (tmp_path, {"audio": 1}, "Whisper.*encoder-decoder"),
            (checkpoints["qwen3"], {"audio": 1}, "Qwen3ForCausalLM with audios"),
            (folders["qwen3-asr"], {"image": 1}, "Qwen3ASR.* with images")):
        with pytest.raises(ValueError, match=says):
            start(folder, limit_mm_per_prompt=limits)
    with pytest.raises(ValueError, match="'audio'"):
        engine.generate({"prompt_token_ids": [1, AUDIO], "multi_modal_data": {"image": 1}}, GREEDY)
    with start(folders["voxtral"]) as llm, pytest.raises(ValueError, match="pass what a processor"):
        llm.generate({"prompt": PLACE, "multi_modal_data": {"audio": (speech(1), 16000)}}, GREEDY)
    with start(folders["glm-asr"]) as llm:
        with pytest.raises(ValueError, match="language='en'"):
            llm.inputs.transcription((speech(1), 16000), "en", None)
        with pytest.raises(ValueError, match="0 tokens"):
            llm.generate({"prompt": "Hi", "multi_modal_data": {"audio": (np.zeros(9), 16000)}})
