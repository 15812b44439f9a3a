"""Packaging of modeling_relish; the tools' settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md")

# The lower bounds are the versions that the tests ran with (see constraints.txt): nothing older has been tried.
INSTALL_REQUIRES = [
    "torch>=2.13.0",
    "transformers>=5.24,<6",
    "accelerate>=1.15.0",
    "datasets>=5.2.0",
    "evaluate>=0.4.6",
    "huggingface-hub>=2.4.0",
    "safetensors>=0.8.0",
    "numpy>=2.4.6",
    "scipy>=1.17.1",
    "typer>=0.29.2",
    "rich>=15.0.0",
]
DEMO = ["gguf>=0.19.0"]
PEFT = ["peft>=0.21.2"]
TRL = ["trl>=1.16.0"]
EXPLAIN = ["matplotlib>=3.11.2"]
COMPARE = [*PEFT, *EXPLAIN, "scikit-learn>=1.9.1"]
DEV = [
    *DEMO,
    *PEFT,
    *TRL,
    *COMPARE,
    "ipykernel>=7.4.0",
    "mypy>=2.4.1",
    "nbclient>=0.11.0",
    "pytest>=9.2.0",
    "pytest-cov>=7.1.0",
    "pytest-timeout>=2.4.0",
    "pytest-xdist>=3.8.0",
    "ruff>=0.17.6",
    "tensorboard>=2.21.0",
    "bitsandbytes>=0.50.2",  # QLoRA; runs on CPUs too
]

setup(
    name="modeling-relish",
    version="0.1.0",
    description="RELISH: numbers from text with a small regression head over a frozen language model",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",  # transformers 5.24 needs it
    packages=find_packages(include=["modeling_relish*"]),
    package_data={"": ["*.md"]},
    install_requires=INSTALL_REQUIRES,
    extras_require={"demo": DEMO, "peft": PEFT, "trl": TRL, "explain": EXPLAIN, "compare": COMPARE, "dev": DEV},
    entry_points={"console_scripts": ["relish = modeling_relish.cli:main"]},
    keywords=["regression", "large language models", "transformers", "huggingface", "reward model"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
