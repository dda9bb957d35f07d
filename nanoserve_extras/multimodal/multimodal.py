"""Models that take images or sounds: features replace the embeddings of placeholder tokens.

A vision-language model (Liu et al. 2023, "LLaVA") is a decoder with an encoder, the *tower*. The
tower turns an image into features, one for each placeholder token of the prompt; from there on a
feature is treated like any token. (Sounds are the same with another tower, Chu et al. 2023,
"Qwen-Audio": read "sound" for "image" or "picture" in this file.)

    prompt     What  is  <image> <image> <image> <image>  ?
    decoder     e     e     f0      f1      f2      f3    e      e: embedding, f: feature
    chunks     └────────────────────────┘└────────────────┘     cut anywhere, through an image, too

Gemma's image tokens attend to each other in both directions. Then a chunk may begin within an
image, after cached blocks, but must not end there.

Network and tower are transformers' (transformers_model.py). One hook before the decoder inserts the
step's features, and the positions of M-RoPE (Wang et al. 2024, "Qwen2-VL"). Both depend only on a
token's index in its sequence. So chunks, prefix hits, preemption, overlap, recurrent states and
drafts need no special case.

Invariants. **A block is found only by requests with the same pixels**: the key of the block with an
image's first placeholder, and so all later keys, contain a hash of the tower's inputs
(`CoreRequest.contents`). **An image is encoded once** while the encoder cache holds it.

Known limits: one rank; no video.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from itertools import accumulate, groupby
from pathlib import Path
from threading import RLock

import numpy as np
import torch
from transformers import ProcessorMixin

from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.progress import say
from nanoserve.request import Request
from nanoserve.sampler import put
from nanoserve.sequence import Sequence, Step
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.inputs import Inputs, Prompt, salt_of, template_of
from nanoserve_extras.base.messages import MediaError
from nanoserve_extras.base.metrics import Counter, Gauge, Metric
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.words import in_words, words_of
from nanoserve_extras.engine_args import MultimodalOptions
from nanoserve_extras.foreign.transformers_model import TransformersModel, refusal
from nanoserve_extras.multimodal.multimodal_inputs import (
    MediaItem,
    from_tensors,
    load_processor,
    read_image,
    read_sound,
    take_out,
)

# Wrappings that were compared with transformers' `generate`, by what they take (docs/extras.md).
TRIED = {"image": ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "SmolVLM", "Idefics3", "InternVL",
                   "Llava", "Mistral3", "Lfm2Vl", "Gemma3", "Gemma4"),
         "audio": ("Qwen3ASR", "GlmAsr", "Voxtral")}
KINDS = {f"{name}ForConditionalGeneration": kind for kind in TRIED for name in TRIED[kind]}

MOST_IMAGES = 4  # that one step encodes
NO_TENSORS = ("vision_feature_layer", "vision_feature_select_strategy", "kwargs")


@dataclass(eq=False)
class Shown:
    """A request's pictures, and their places in its prompt."""

    pictures: list[MediaItem]
    places: np.ndarray  # all placeholders, ascending
    positions: np.ndarray | None  # (3, num_prompt_tokens), where the decoder has M-RoPE

    @cached_property
    def firsts(self) -> list[int]:
        """Where in `places` each picture begins."""
        return [0, *accumulate(picture.num_tokens for picture in self.pictures)][:-1]

    @cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """For each placeholder the first and the last one of its run, without other tokens in
        between. If a picture is shown as several crops, each crop is a run."""
        breaks = np.flatnonzero(np.diff(self.places) > 1)
        begins, ends = np.append(-1, breaks) + 1, np.append(breaks, len(self.places) - 1)
        lengths = ends - begins + 1 if len(self.places) else [0]
        return tuple(np.repeat(self.places[at] if len(self.places) else at, lengths)
                     for at in (begins, ends))

    def positions_of(self, start: int, count: int) -> np.ndarray:
        """Positions, (3, count). After the prompt all three go on from the largest one."""
        index = np.broadcast_to(np.arange(start, start + count), (3, count))
        if self.positions is None:
            return index
        length = self.positions.shape[1]
        behind = index[:, max(length - start, 0):] + self.positions.max() + 1 - length
        return np.concatenate((self.positions[:, start:start + count], behind), 1)


class EncoderCache:
    """A network's tower, its encoder cache, and the hook before its decoder."""

    def __init__(self, kind: str, budget: int):
        self.kind = kind
        self.budget, self.num_tokens, self.num_runs, self.num_asked = budget, 0, 0, 0
        self.held: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # least recently used first
        self.lock = RLock()  # requests are made in any thread
        self.mutual: list[int] = []  # layers in which tokens of an image see each other
        # Of the step to come: which tokens of the batch are placeholders, (k,); their features,
        # (k, width); positions, (3, 1, num_tokens), where the decoder has M-RoPE; the last token
        # that each token sees, (num_tokens,).
        self.view: tuple[torch.Tensor, ...] | None = None

    def join(self, model: TransformersModel) -> None:
        """Use this network's tower: the first network, or the same with other weights."""
        network, self.on, kind = model.layers, model.on, self.kind
        self.network = weakref.proxy(network)  # weak: its hook holds this object
        self.size = network.get_input_embeddings().embedding_dim
        self.index_of = getattr(network.base_model, "get_rope_index", None) and (
            weakref.WeakMethod(network.base_model.get_rope_index))
        # All of Gemma 3's; of Gemma 4's those with a window.
        vision = getattr(network.config.get_text_config(), "use_bidirectional_attention", None)
        self.mutual = [layer for layer, window in zip(model.attending, model.windows, strict=True)
                       if network.config.model_type == "gemma3" or vision == "vision" and window]
        self.config, self.token_id = network.config, getattr(network.config, f"{kind}_token_id")
        self.takes = [name for name in signature(getattr(
            network.base_model, f"get_{kind}_features")).parameters if name not in NO_TENSORS]
        self.width = self.size * (1 + len(getattr(getattr(
            network.config, "vision_config", None), "deepstack_visual_indexes", None) or ()))
        network.get_decoder().register_forward_pre_hook(self.look, with_kwargs=True)
        self.forget()  # once more: meanwhile another thread may have asked the old tower

    def forget(self) -> None:
        with self.lock:
            self.held.clear()
            self.num_tokens = 0

    # ------------------------------------------------------------ the tower

    def features_of(self, picture: MediaItem) -> torch.Tensor:
        """(picture.num_tokens, width), from the cache or by the tower. Raises `ValueError`."""
        with self.lock:
            self.num_asked += 1
            found = self.held.pop(picture.content, None)
            if found is None:
                with in_words(f"the tower can't read this {self.kind}"):  # whatever it raises
                    found = self.encode(picture)
                self.num_tokens += len(found)
                while self.held and self.num_tokens > self.budget:
                    self.num_tokens -= len(self.held.popitem(last=False)[1])
            self.held[picture.content] = found
        if picture.num_tokens not in (None, len(found)):
            raise ValueError(f"{picture.num_tokens} placeholders for {len(found)} features: correct"
                             " the processor's files (image_seq_length, say, is another model's)")
        return found

    @torch.inference_mode()
    def encode(self, picture: MediaItem) -> torch.Tensor:
        """Run the tower. Qwen3-VL's returns features for several layers: they are concatenated."""
        given = {name: put(tensor, self.on.dtype if tensor.is_floating_point() else tensor.dtype,
                           device=self.on.device) for name, tensor in picture.tensors.items()}
        out = getattr(self.network, f"get_{self.kind}_features")(**given, return_dict=True)
        layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        self.num_runs += 1
        return torch.cat([torch.cat([part.reshape(-1, self.size) for part in layer])
                          for layer in layers], 1).to(self.on.dtype)

    def show(self, ids: list[int], pictures: list[MediaItem]) -> Shown:
        """Find the pictures in a checked prompt. M-RoPE's positions are the class's own."""
        tokens = torch.tensor([ids])
        marks = (tokens == self.token_id).int()
        positions = None
        if self.index_of is not None:
            runs = [len([*run]) for mark, run in groupby(marks[0].tolist()) if mark]
            if runs != [picture.num_tokens for picture in pictures]:
                raise ValueError(f"placeholders stand in runs of {runs}: put each image's together,"
                                 " and another token between two images")
            grids = torch.cat([picture.tensors["image_grid_thw"] for picture in pictures])
            positions = self.index_of()(tokens, mm_token_type_ids=marks,
                                        image_grid_thw=grids)[0][:, 0].numpy()
        shown = Shown(pictures, marks[0].nonzero()[:, 0].numpy(), positions)
        if self.mutual and not set(shown.places[shown.firsts]) <= set(shown.runs[0]):
            raise ValueError("put another token between the placeholders of two images, or their "
                             "tokens would see each other")
        return shown

    # --------------------------------------------------------------- a step

    def expect(self, step: Step, shown: dict[Sequence, Shown]) -> None:
        """Prepare the next step: encode its images, and note their places in it. shown: by
        sequence."""
        self.view = None
        if shown.keys().isdisjoint(step.num_new_tokens):
            return
        index, positions, seen, at = [], [], [], 0
        features = [torch.empty(0, self.width, dtype=self.on.dtype, device=self.on.device)]
        rows = zip(step.num_new_tokens.items(), step.starts, strict=True)
        for (seq, count), start in sorted(rows, key=lambda row: row[0][1] > 1):  # as in the batch
            one = shown.get(seq, NOTHING)
            first, last = np.searchsorted(one.places, (start, start + count))
            index.append(one.places[first:last] - start + at)
            seen.append(np.arange(start, start + count))
            seen[-1][one.places[first:last] - start] = one.runs[1][first:last]
            try:  # two pictures of 4: places 3 .. 6 are the last of one, and three of the other
                features += [self.features_of(picture)[max(first - begin, 0):last - begin]
                             for picture, begin in zip(one.pictures, one.firsts, strict=True)
                             if first < begin + picture.num_tokens and begin < last]
            except Exception as error:  # the request ends with this step, and no other
                step.failed[seq] = words_of(error)
                features.append(features[0].new_zeros(last - first, self.width))
            positions.append(one.positions_of(start, count))
            at += count
        turned, index = (put(numbers, torch.int64, device=self.on.device) for numbers in (
            np.concatenate(positions, 1), np.concatenate(index)))
        self.view = (index, torch.cat(features), None if self.index_of is None else turned[:, None],
                     put(np.concatenate(seen), torch.int32, device=self.on.device))

    def look(self, decoder: torch.nn.Module, args: tuple, given: dict) -> tuple | None:
        """The hook before the decoder: inserts the step's features into the decoder's arguments."""
        view, self.view = self.view, None
        if view is None:
            return None
        index, features, positions, seen = view
        if positions is not None:
            given["position_ids"] = positions
        if len(index):
            given["nanoserve"] = replace(given["nanoserve"], last=dict.fromkeys(self.mutual, seen))
            first, *deeper = features.split(self.size, 1)
            given["inputs_embeds"] = given["inputs_embeds"].index_copy(1, index, first[None])
            if deeper:  # added to the hidden states behind the first layers
                mask = torch.zeros_like(given["inputs_embeds"][..., 0], dtype=torch.bool)
                mask[0, index] = True
                given |= dict(visual_pos_masks=mask, deepstack_visual_embeds=deeper)
        return args, given


NOTHING = Shown([], np.zeros(0, dtype=np.int64), None)  # a text


class MultimodalInputs(Inputs):
    """Reads prompts with images, besides all others. It matches placeholders with pictures, so that
    no step meets one that doesn't fit."""

    def __init__(self, extra: "Multimodal", folder: Path, *args):
        super().__init__(*args)
        self.extra, self.encoder, self.folder = extra, extra.encoder, folder
        self.tried: set[tuple] = set()  # shapes of tensors for which processor and tower agree
        if self.arguments:
            self.processor  # noqa: B018 - now, so that a name that it lacks is said at the start

    @property
    def arguments(self) -> dict:
        return self.extra.options.mm_processor_kwargs or {}

    @cached_property
    def processor(self) -> ProcessorMixin:
        """The processor. Raises `ValueError` for arguments that it would ignore with a warning."""
        processor = load_processor(self.folder, self.encoder.config)
        if self.arguments:
            part = getattr(processor, "image_processor", None) or processor.feature_extractor
            known = getattr(part, "valid_kwargs", part.__call__).__annotations__.keys()
            if unknown := self.arguments.keys() - known:
                raise ValueError(f"mm_processor_kwargs: this model's processor takes no "
                                 f"{min(unknown)}: choose of {', '.join(sorted(known))}")
        return processor

    def process(self, request_id: str, prompt: Prompt, *args, **given) -> Request:
        """As for texts; raises `ValueError` for images that are invalid, too large or too many."""
        text, ids, pictures = self.see(prompt)
        request = super().process(request_id, {
            "prompt": text, "prompt_token_ids": ids, "cache_salt": salt_of(prompt),
            "chat_template": template_of(prompt)}, *args, **given)
        found = request.prompt_token_ids.count(self.encoder.token_id)
        if found != (needed := sum(picture.num_tokens for picture in pictures)):
            raise MediaError(f"the prompt has {found} placeholders (token "
                             f"{self.encoder.token_id}), "
                             f"and its {len(pictures)} images stand for {needed}: write as many, "
                             "or one for each image")
        if pictures:
            self.extra.take(request, pictures)
        return request

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        return self.see(prompt)[:2]

    def see(self, prompt: Prompt) -> tuple[str | None, list[int], list[MediaItem]]:
        """A prompt's text and ids, with as many placeholders as its pictures need."""
        if not isinstance(prompt, Mapping) or not prompt.get("multi_modal_data"):
            return *super().read_prompt(prompt), []
        rest = dict(prompt)
        try:
            pictures = self.read_pictures(rest.pop("multi_modal_data"))
        except ValueError as error:
            raise MediaError(str(error)) from error
        text, ids = super().read_prompt(rest)
        return text, self.expand(ids, pictures), pictures

    def read_pictures(self, data: object) -> list[MediaItem]:
        kind, budget = self.encoder.kind, self.encoder.budget
        if not isinstance(data, Mapping) or set(data) != {kind}:
            raise ValueError(f"multi_modal_data={str(data)[:80]} must be {{{kind!r}: ...}}, which "
                             "is all that this model takes beside text")
        whole = data[kind] if isinstance(data[kind], list) else [data[kind]]
        if len(whole) > (most := self.extra.options.limit_mm_per_prompt[kind]):
            raise ValueError(f"the prompt has {len(whole)} {kind}s, and limit_mm_per_prompt allows "
                             f"{most}: raise it")
        pictures = [self.read_picture(one) for one in whole]
        for one in pictures:
            if not 0 < (size := one.num_tokens) <= budget:
                change = "smaller, or raise encoder_cache_tokens" if size else "larger"
                raise ValueError(f"an {kind} of {size} tokens does not fit into the encoder cache "
                                 f"of {budget}: make it {change}")
            shapes = tuple(tensor.shape[1:] for tensor in one.tensors.values())  # [0]: tiles, say
            if shapes not in self.tried:
                self.encoder.features_of(one)
                self.tried.add(shapes)
        return pictures

    def read_picture(self, image: object) -> MediaItem:
        """Read an image. The processor tells its number of tokens; if the user's processor made the
        tensors, the tower does."""
        kind = self.encoder.kind
        if isinstance(image, Mapping):
            picture = from_tensors(image, self.encoder.takes)
            picture.num_tokens = len(self.encoder.features_of(picture))
            return picture
        given = dict(images=[read_image(image)]) if kind == "image" else dict(
            audio=[read_sound(image, self.processor.feature_extractor.sampling_rate)])
        with in_words(f"this model's processor can't read this {kind}"):
            made = self.processor(**given, text=getattr(self.processor, f"{kind}_token"),
                                  return_tensors="pt", return_text_replacement_offsets=True,
                                  **self.arguments)
        written = self.processor.tokenizer.encode(
            made["text_replacement_offsets"][0][0]["replacement"], add_special_tokens=False)
        return MediaItem({name: made[name] for name in self.encoder.takes if name in made},
                       written.count(self.encoder.token_id), written)

    def transcription(self, sound: object, language: str | None, hint: str | None) -> dict:
        """The processor's prompt for a transcription. Raises `ValueError`."""
        write = getattr(self.processor, "apply_transcription_request", None)
        if self.encoder.kind != "audio" or write is None:
            raise ValueError("this model's processor writes no prompts for transcriptions")
        options = dict(language=language) if language else {}
        if language and "language" not in signature(write).parameters:
            raise ValueError(f"language={language!r}: this model finds it by itself, leave it out")
        [text] = write(audio=np.zeros(1), tokenize=False, prompt=hint, **options)
        return {"prompt": text, "prompt_token_ids": self.encode(text, add_special_tokens=False),
                "multi_modal_data": {"audio": sound}}

    def expand(self, ids: list[int], pictures: list[MediaItem]) -> list[int]:
        """Replace each image's placeholder by the tokens that the processor writes for it. Line
        breaks at their ends merge with those around, as they do in a text (Gemma 3)."""
        written = [picture.written for picture in pictures]
        if not all(written) or ids.count(self.place_id) != len(pictures) or (
                self.place_id != self.encoder.token_id and self.encoder.token_id in ids):
            return ids
        turn, found, is_behind, tokenizer = iter(written), [], False, self.processor.tokenizer

        def is_break(id_: int) -> bool:
            return set(tokenizer.decode([id_])) == {"\n"}

        for id_ in ids:
            is_place = id_ == self.place_id
            part, breaks = list(next(turn)) if is_place else [id_], []
            if found and (is_place or is_behind) and is_break(part[0]):
                while found and is_break(found[-1]):
                    breaks.insert(0, found.pop())
                while breaks and part and is_break(part[0]):
                    breaks.append(part.pop(0))
                text = tokenizer.decode(breaks)
                found += self.encode(text, add_special_tokens=False) if breaks else []
            found += part
            is_behind = is_place
        return found

    @cached_property
    def place_id(self) -> int:
        """The token that stands for an image in a prompt: Gemma 3 has one for that alone."""
        token = getattr(self.processor, f"{self.encoder.kind}_token")
        return self.processor.tokenizer.convert_tokens_to_ids(token)

    def render_chat(self, conversation: list[dict], **template_options) -> dict:
        """As for texts, also with images or sounds. For older processors the template is theirs."""
        found, kind = [], self.encoder.kind
        if isinstance(conversation, (list, tuple)):
            conversation = [take_out(message, kind, found) for message in conversation]
        if found and not self.tokenizer_for("chat()").chat_template:
            template_options.setdefault("chat_template", self.processor.chat_template)
        prompt = super().render_chat(conversation, **template_options)
        if not found:
            return prompt
        if (shown := prompt["prompt_token_ids"].count(self.place_id)) != len(found):
            raise MediaError(
                f"the messages have {len(found)} {kind}s, and the chat template writes {shown} "
                f"placeholders: put {kind}s into the user's turns, and no placeholders into texts")
        return prompt | {"multi_modal_data": {kind: found}}


class Multimodal(Extra):
    """The extra behind `LLM(limit_mm_per_prompt={"image": n})`."""

    Options = MultimodalOptions
    needs = frozenset([Fact.GENERATES, Fact.ONE_STAGE, Fact.ALL_KEYS])
    ends = frozenset([Fact.GRAPHS])

    @property
    def name(self) -> str:
        return f"limit_mm_per_prompt={self.options.limit_mm_per_prompt}"

    def prepare(self, plan: Plan) -> Plan:
        architecture, limits = plan.model_config.architecture, self.options.limit_mm_per_prompt
        if KINDS.get(architecture) not in limits:
            raise refusal(f"{architecture} with {'s and '.join(limits)}s",
                          "it has no tower for them, or none that was tried. Without "
                          "limit_mm_per_prompt it writes text")
        self.encoder = EncoderCache(KINDS[architecture], self.options.encoder_cache_tokens)
        parts = replace(plan.parts, make_network=partial(self.make, plan.parts.make_network))
        return replace(plan, parts=parts, make_inputs=partial(
            MultimodalInputs, self, plan.folder))

    def make(self, make_network: Callable, *args, **options) -> TransformersModel | None:
        model = make_network(*args, **options)
        if model is not None:  # it was more than a trial
            self.encoder.join(model)
        return model

    def attach(self, engine: LLMEngine) -> None:
        self.config = engine.config
        self.shown: dict[Sequence, Shown] = {}
        encoder = self.encoder
        size = encoder.budget * encoder.width * encoder.on.dtype.itemsize / 2 ** 20
        say(f"{encoder.kind}s: by transformers' tower, encoder cache of {encoder.budget:,} tokens, "
            f"up to {size:,.0f} MB")

    def take(self, request: Request, pictures: list[MediaItem]) -> None:
        """Attach pictures to a checked request: from here on its block keys depend on them, too."""
        shown = self.encoder.show(request.prompt_token_ids, pictures)
        for picture, first in zip(pictures, shown.firsts, strict=True):
            block, content = int(shown.places[first]) // self.config.block_size, picture.content
            if self.encoder.mutual:  # how its tokens are laid out decides what they see
                own = shown.runs[1][first:first + picture.num_tokens] - shown.places[first]
                content += own.astype(np.int32).tobytes()
            contents = request.core.contents
            contents[block] = contents.get(block, b"") + content
        if self.encoder.mutual and self.config.enable_chunked_prefill:
            # Beside all the rows that may decode, so that its turn comes.
            rows, most = self.config.max_num_seqs, self.config.max_num_batched_tokens
            longest = int((shown.runs[1] - shown.runs[0]).max()) + rows
            if longest > most:
                raise MediaError(f"an image of {longest - rows + 1} tokens is computed in one step,"
                                 f" beside up to {rows - 1} other requests: raise "
                                 f"max_num_batched_tokens={most} to {longest}")
        request.made[self] = shown

    # ------------------------------------------------------ the life of a request

    def added(self, request: Request) -> None:
        if (shown := request.made.get(self)) is not None:
            self.shown.update(dict.fromkeys(request.sequences, shown))

    def cut(self, step: Step, seq: Sequence, start: int, count: int) -> int:
        """End a chunk before the image that would be one too many for the tower in this step, and
        not within an image whose tokens attend to each other."""
        if not self.config.enable_chunked_prefill:
            return count
        shown = self.shown.get(seq, NOTHING)
        behind = int(np.searchsorted(shown.places, start + count))  # the first place behind it
        if self.encoder.mutual and 0 < behind < len(shown.places) and (
                shown.runs[0][behind - 1] == shown.runs[0][behind]):
            count = max(int(shown.runs[0][behind]) - start, 0)
        rows = zip(step.num_new_tokens.items(), step.starts, strict=True)
        due = {picture.content: picture.num_tokens for (other, n), first in rows
               for picture, _ in self.missing(other, first, n)}
        for picture, begin in self.missing(seq, start, count):
            due[picture.content] = picture.num_tokens
            if len(due) > MOST_IMAGES or (
                    len(due) > 1 and sum(due.values()) > self.config.max_num_batched_tokens):
                return max(begin - start, 0)
        return count

    def launching(self, step: Step) -> None:
        self.encoder.expect(step, self.shown)

    def missing(self, seq: Sequence, start: int, count: int) -> Iterator[tuple[MediaItem, int]]:
        """The images of these tokens that must be encoded, and where each begins."""
        shown = self.shown.get(seq, NOTHING)
        for picture, first in zip(shown.pictures, shown.firsts, strict=True):
            begin, last = shown.places[first], shown.places[first + picture.num_tokens - 1]
            if begin < start + count and last >= start and picture.content not in self.encoder.held:
                yield picture, int(begin)

    def ended(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self.shown.pop(seq, None)

    def metrics(self) -> list[Metric]:
        """Metrics of the encoder cache: images looked up, and found."""
        encoder = self.encoder
        return [Counter("vllm:mm_cache_queries", {}, encoder.num_asked),
                Counter("vllm:mm_cache_hits", {}, encoder.num_asked - encoder.num_runs),
                Gauge("vllm:mm_cache_usage_perc", {}, encoder.num_tokens / encoder.budget)]

    def reset(self) -> None:
        self.encoder.forget()

    def close(self) -> None:
        self.encoder.forget()
