"""Texts that are embedded and scored by the reference and by us. Imports nothing."""

from __future__ import annotations

_LONG = "The river carried the old boat past the mill, and nobody on the bank remembered who had built it. "

TEXTS = [
    "",
    "a",
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "Das Wetter ist heute herrlich, und der Fluss führt Hochwasser.",
    "La météo est superbe aujourd'hui.",
    "今日はとても良い天気です。",
    "今天天气很好,河水清澈。",
    "Сегодня прекрасная погода.",
    "الطقس جميل اليوم",
    "आज मौसम बहुत अच्छा है",
    "emoji 🎉🚀 and symbols ∑∂∫ £€¥",
    "MiXeD CaSe and   runs\tof\nspace",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "supercalifragilisticexpialidocious pneumonoultramicroscopicsilicovolcanoconiosis",
    "x" * 300,
    "[MASK] is a word of the vocabulary, and so is [SEP].",
    _LONG * 8,  # within the limit
    _LONG * 40,  # cut off
]

QUERY = "who built the old boat"
DOCUMENTS = [
    "the mill",
    "",
    "nobody on the bank remembered who built the boat",
    "the river carried the boat past the mill",
    "a boat a boat a boat",
    "today the weather is lovely and the river is high and nobody is on the bank of it",
    "the old boat was built by who nobody remembered " * 10,  # cut off
]
