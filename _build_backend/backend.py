"""scikit-build-core, plus the CUDA compiler from PyPI when JAXNORM_CUDA_TOOLKIT=pypi asks for it."""

import os

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

# One 13.x minor for all parts: nvcc refuses a crt or an nvvm of another one.
_CUDA_VERSION = "13.0.*"
_CUDA_PARTS = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
)


def _cuda_requirements():
    if os.environ.get("JAXNORM_CUDA_TOOLKIT", "system") != "pypi":
        return []
    return [f"{part}=={_CUDA_VERSION}" for part in _CUDA_PARTS]


def get_requires_for_build_wheel(config_settings=None):
    return _build.get_requires_for_build_wheel(config_settings) + _cuda_requirements()


def get_requires_for_build_editable(config_settings=None):
    return _build.get_requires_for_build_editable(config_settings) + _cuda_requirements()
