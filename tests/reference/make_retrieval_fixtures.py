"""Writes what transformers computes of an embedding model and of tiny random rerankers.

    python tests/reference/make_retrieval_fixtures.py [--folder FOLDER] [--minilm MODEL]

minilm.safetensors, of the sentence-transformers model in the folder MODEL and the texts of `retrieval_texts.py`:

    vectors   float32 [texts, 384]   mean of the last hidden states, length 1, of at most 256 tokens
    tokens    int32   [texts]        how many were read

A folder for each reranker has a checkpoint of it, made from a seed, and `scores.json`: query, documents, logits.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.reference.retrieval_texts import DOCUMENTS, QUERY, TEXTS

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "retrieval"
MOST_TOKENS = 256  # sentence_bert_config.json of the model
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}

# As the model card of Qwen3-Reranker has it.
BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MIDDLE = f"<Instruct>: {INSTRUCTION}\n<Query>: {{}}\n<Document>: {{}}"
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def write_minilm(model: Path, folder: Path) -> None:
    """Embed the texts."""
    library = Tokenizer.from_file(str(model / "tokenizer.json"))
    library.no_padding()
    library.enable_truncation(MOST_TOKENS)
    encoder = transformers.AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    vectors, counts = [], []
    for text in TEXTS:
        ids = torch.tensor([library.encode(text).ids])
        with torch.no_grad():
            states = encoder(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        vectors.append(torch.nn.functional.normalize(states.mean(dim=1))[0])
        counts.append(ids.shape[1])
    save_file(
        {"vectors": torch.stack(vectors), "tokens": torch.tensor(counts, dtype=torch.int32)},
        folder / "minilm.safetensors",
    )


def words(special: dict[str, int], unknown: str, more: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer of whole words: those of the texts that are scored, behind the special ones."""
    splitter = pre_tokenizers.Whitespace()
    text = " ".join([QUERY, *DOCUMENTS, BEGIN, MIDDLE, END])
    found = sorted({word for word, _ in splitter.pre_tokenize_str(text)} | set(more))
    vocabulary = dict(special)
    for word in found:
        vocabulary.setdefault(word, len(vocabulary))
    library = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    library.pre_tokenizer = splitter
    library.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    return library


def bert() -> tuple[transformers.PreTrainedModel, Tokenizer]:
    """The first token through the pooler; segments tell query and document apart."""
    library = words({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}, "[UNK]")
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    config = transformers.BertConfig(
        vocab_size=library.get_vocab_size(), max_position_embeddings=48, num_labels=1, **SMALL
    )
    return transformers.BertForSequenceClassification(config), library


def xlm_roberta() -> tuple[transformers.PreTrainedModel, Tokenizer]:
    """Positions count from the id of padding."""
    library = words({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}, "<unk>")
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    config = transformers.XLMRobertaConfig(
        vocab_size=library.get_vocab_size(),
        max_position_embeddings=50,
        num_labels=1,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        **SMALL,
    )
    return transformers.XLMRobertaForSequenceClassification(config), library


def modernbert() -> tuple[transformers.PreTrainedModel, Tokenizer]:
    """Two of three layers see a window alone."""
    library = words({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}, "[UNK]")
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    config = transformers.ModernBertConfig(
        vocab_size=library.get_vocab_size(),
        max_position_embeddings=48,
        num_labels=1,
        local_attention=8,
        classifier_pooling="mean",
        initializer_cutoff_factor=2.0,
        pad_token_id=0,
        cls_token_id=2,
        sep_token_id=3,
        bos_token_id=2,
        eos_token_id=3,
        **SMALL,
    )
    config._attn_implementation = "eager"
    return transformers.ModernBertForSequenceClassification(config), library


def qwen3() -> tuple[transformers.PreTrainedModel, Tokenizer]:
    """Says yes or no."""
    special = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<unk>": 3}
    library = words(special, "<unk>", ("yes", "no"))
    config = transformers.Qwen3Config(
        vocab_size=library.get_vocab_size(),
        max_position_embeddings=128,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        **SMALL,
    )
    return transformers.Qwen3ForCausalLM(config), library


RERANKERS = {"bert": bert, "xlm-roberta": xlm_roberta, "modernbert": modernbert, "qwen3": qwen3}


def write_reranker(name: str, folder: Path) -> None:
    """A checkpoint of random weights, and its scores."""
    torch.manual_seed(sorted(RERANKERS).index(name) + 1)
    model, library = RERANKERS[name]()
    model = model.eval()
    for parameter in model.parameters():  # biases are zero and norms one, so that a fault in them would not show
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    library.save(str(folder / "tokenizer.json"), pretty=False)
    logits = [float(scored(name, model, library, document)) for document in DOCUMENTS]
    body = {"query": QUERY, "documents": DOCUMENTS, "logits": logits}
    (folder / "scores.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def scored(name: str, model: Any, library: Tokenizer, document: str) -> torch.Tensor:
    """The logit of a document."""
    if name == "qwen3":
        ids = [library.encode(text).ids for text in (BEGIN, MIDDLE.format(QUERY, document), END)]
        room = model.config.max_position_embeddings - len(ids[0]) - len(ids[2])
        row = torch.tensor([[*ids[0], *ids[1][:room], *ids[2]]])
        with torch.no_grad():
            logits = model(row).logits[0, -1]
        return logits[library.token_to_id("yes")] - logits[library.token_to_id("no")]
    reserved = 2 if name == "xlm-roberta" else 0
    library.enable_truncation(model.config.max_position_embeddings - reserved, strategy="only_second")
    pair = library.encode(QUERY, document)
    segments = {"token_type_ids": torch.tensor([pair.type_ids])} if name == "bert" else {}
    with torch.no_grad():
        return model(torch.tensor([pair.ids]), **segments).logits[0, 0]


def main() -> None:
    """Write them all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--minilm", type=Path, help="folder of the model; without it its fixture is left alone")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.minilm:
        write_minilm(given.minilm, given.folder)
    for name in RERANKERS:
        (given.folder / name).mkdir(exist_ok=True)
        write_reranker(name, given.folder / name)


if __name__ == "__main__":
    main()
