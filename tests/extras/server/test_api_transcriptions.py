"""`/v1/audio/transcriptions`, as OpenAI's client sends it: a form with a WAV file. The oracle is
transformers' processor and `generate`."""


import pytest

pytest.importorskip("fastapi")
pytest.importorskip("python_multipart")
openai = pytest.importorskip("openai")

from serving import NAME, Serving  # noqa: E402

from nanoserve import LLM  # noqa: E402

PATH, MAX_TOKENS = "/v1/audio/transcriptions", 12
FORM = "multipart/form-data; boundary=xyz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from hearing import make_hearing
    return make_hearing("qwen3-asr", tmp_path_factory.mktemp("asr"))


@pytest.fixture(scope="module")
def serving(folder):
    with Serving(LLM(folder, dtype="float32", num_gpu_blocks_override=32, max_model_len=100,
                     limit_mm_per_prompt={"audio": 1})) as serving:
        yield serving


@pytest.fixture(scope="module")
def client(serving):
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)


def test_a_transcription_is_what_transformers_writes(folder, client):
    import transformers
    from hearing import speech, wav
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForMultimodalLM.from_pretrained(folder).eval()
    said = set()
    for seed, options in ((1, {}), (2, {}), (1, dict(language="en")),
                          (1, dict(prompt="A tone", language="German"))):
        made = processor.apply_transcription_request(audio=speech(seed), **options)
        ids = model.generate(**made, max_new_tokens=MAX_TOKENS, do_sample=False)
        want = processor.decode(ids[0, made["input_ids"].shape[1]:],
                                return_format="transcription_only")
        for form in ("json", "text"):
            answer = client.audio.transcriptions.create(
                model=NAME, file=("said.wav", wav(speech(seed))), response_format=form,
                extra_body=dict(max_completion_tokens=MAX_TOKENS), **options)
            assert (answer if form == "text" else answer.text) == want
        said.add(want)
    assert len(said) == 4


def test_a_field_that_is_not_filled_in_says_nothing(client):
    """An empty hint was a turn of its own in the prompt, and the text another one."""
    from hearing import speech, wav
    asked = dict(model=NAME, file=wav(speech(1)), extra_body=dict(max_completion_tokens=8))
    plain = client.audio.transcriptions.create(**asked).text
    for empty in ("prompt", "language", "temperature", "response_format", "stop", "seed"):
        extra = dict(max_completion_tokens=8) | {empty: ""}
        assert client.audio.transcriptions.create(**asked | dict(extra_body=extra)).text == plain


def test_it_goes_on_until_there_is_no_room(client):
    from hearing import speech, wav
    sound = wav(speech(1))
    short, whole = (client.audio.transcriptions.create(
        model=NAME, file=sound, extra_body=extra).text
        for extra in (dict(max_completion_tokens=16), {}))
    assert len(whole) > len(short)


BAD = [(dict(file=b"ID3"), "a WAV file .*ffmpeg"),
       (dict(language="Elvish"), "Elvish"), (dict(model="other"), "does not exist"),
       (dict(response_format="srt"), "'json' or 'text'"), (dict(stream=True), "leave stream out"),
       (dict(temperature=-1), "temperature"),
       (dict(extra_body=dict(max_tokens=99)), "max_tokens is 99")]


@pytest.mark.parametrize(("wrong", "says"), BAD, ids=[says for _, says in BAD])
def test_what_is_wrong_is_a_400_that_says_so(client, wrong, says):
    from hearing import speech, wav
    right = dict(model=NAME, file=wav(speech(1)), extra_body=dict(max_completion_tokens=1))
    with pytest.raises(openai.APIStatusError, match=says) as told:
        client.audio.transcriptions.create(**right | wrong)
    assert told.value.status_code == (404 if "model" in wrong else 400)
    assert client.audio.transcriptions.create(**right).text is not None


def test_what_is_no_form_is_named(serving):
    for body, kind, status, says in (
            ({"model": NAME}, "application/json", 415, "send a form"), (b"", FORM, 400, "file"),
            (b"", "multipart/form-data", 400, "boundary"), (b"--xyz\r\n\r\n", FORM, 400, "name"),
            (b'--xyz\r\nContent-Disposition: form-data; name="file"\r\n\r\n\r\n--xyz--', FORM,
             400, "WAV")):
        got, answer = serving.ask(PATH, body, "POST", **{"content-type": kind})
        assert got == status and says in answer["error"]["message"], (kind, answer)


def test_a_model_that_does_not_hear_says_so(checkpoints):
    with Serving(LLM(checkpoints["qwen3"], num_gpu_blocks_override=8)) as serving:
        client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="limit-mm-per-prompt"):
            client.audio.transcriptions.create(model=NAME, file=b"RIFF")
