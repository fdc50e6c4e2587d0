"""As for tests/cuda: a process that has used CUDA cannot fork for other tests."""

from cuda.conftest import no_cuda_in_this_process as no_cuda_in_this_process
