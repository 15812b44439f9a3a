"""What the tests of rewards share: preference pairs in TRL's formats, and tokenizers with a chat template."""

from datasets import Dataset
from tiny import PAIRS, byte_bpe_tokenizer, digit_bpe_tokenizer, save_backbone
from training import tiny_model

# As in Llama 3: the template writes BOS itself.
CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CHATTY = byte_bpe_tokenizer(add_bos=True)  # a plain text too gets one BOS
CHATTY.chat_template, CHATTY.pad_token = CHAT, CHATTY.eos_token
PLAIN = digit_bpe_tokenizer()  # adds nothing to a plain text


def say(text, role="assistant"):
    """Return a conversation of one message."""
    return [{"role": role, "content": text}]


QUESTION = "How was it?"
CHATS = Dataset.from_list([{"prompt": say(QUESTION, "user"), "chosen": say(a), "rejected": say(b)} for a, b in PAIRS])
WHOLE_CHATS = Dataset.from_list(
    [{"chosen": say(QUESTION, "user") + say(a), "rejected": say(QUESTION, "user") + say(b)} for a, b in PAIRS]
)
STRINGS = Dataset.from_list([{"prompt": QUESTION + " ", "chosen": a, "rejected": b} for a, b in PAIRS])
WHOLE_STRINGS = Dataset.from_list([{"chosen": a, "rejected": b} for a, b in PAIRS])


def with_margin(pairs, start=0.0):
    """Return the pairs with a margin that differs from row to row."""
    return pairs.add_column("margin", [start + 0.25 * i for i in range(len(pairs))])


def checkpoint(folder, tokenizer=CHATTY, **settings):
    """Save a head-only checkpoint, with its tokenizer, and its base model beside it; return its folder as a string."""
    if not (folder / "base").exists():
        save_backbone("llama", folder / "base", tokenizer=tokenizer)
    model = tiny_model(str(folder / "base"), **settings)
    model.save_pretrained(folder / "reward-model")
    tokenizer.save_pretrained(folder / "reward-model")
    return str(folder / "reward-model")
