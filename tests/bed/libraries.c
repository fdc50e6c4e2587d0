/* cuBLAS, cuDNN and the others compute nothing; torch reads the results of these calls. */
#include "bed.h"

#define CREATES(name) EXPORT int name(void **made) { *made = calloc(1, 64); return 0; }
#define DESTROYS(name) EXPORT int name(void *made) { free(made); return 0; }
CREATES(cublasCreate_v2)
CREATES(cusparseCreate)
CREATES(cusolverDnCreate)
CREATES(cublasLtCreate)
CREATES(cublasLtMatmulDescCreate) DESTROYS(cublasLtMatmulDescDestroy)
CREATES(cublasLtMatrixLayoutCreate) DESTROYS(cublasLtMatrixLayoutDestroy)
CREATES(cublasLtMatmulPreferenceCreate) DESTROYS(cublasLtMatmulPreferenceDestroy)
CREATES(cudnnCreate)
CREATES(cudnnCreateTensorDescriptor) DESTROYS(cudnnDestroyTensorDescriptor)
CREATES(cudnnCreateFilterDescriptor) DESTROYS(cudnnDestroyFilterDescriptor)
CREATES(cudnnCreateConvolutionDescriptor) DESTROYS(cudnnDestroyConvolutionDescriptor)
CREATES(cudnnCreateActivationDescriptor) DESTROYS(cudnnDestroyActivationDescriptor)
CREATES(cudnnCreatePoolingDescriptor)

EXPORT int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return 0;
}
EXPORT size_t cublasLtGetVersion(void) { return 130100; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                          int asked, char *found, int *count) {
    memset(found, 0, 96); /* one algorithm, without a workspace */
    *count = 1;
    return 0;
}

EXPORT size_t cudnnGetVersion(void) { return 92400; }
EXPORT size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
EXPORT int cudnnGetProperty(int which, int *value) { /* major, minor, patch of 9.24.0 */
    *value = which == 0 ? 9 : which == 1 ? 24 : 0;
    return 0;
}

typedef struct { int algorithm, status; float time; size_t workspace; int determinism, math, reserved[3]; } Performance;
#define FINDS_ONE_ALGORITHM(name)                                                                              \
    EXPORT int name(void *handle, void *a, void *b, void *c, void *d, int asked, int *count, Performance *into) { \
        *into = (Performance){.determinism = 1};                                                               \
        *count = 1;                                                                                            \
        return 0;                                                                                              \
    }
FINDS_ONE_ALGORITHM(cudnnGetConvolutionForwardAlgorithm_v7)
FINDS_ONE_ALGORITHM(cudnnGetConvolutionBackwardDataAlgorithm_v7)
FINDS_ONE_ALGORITHM(cudnnGetConvolutionBackwardFilterAlgorithm_v7)

#define NEEDS_NO_WORKSPACE(name)                                                                       \
    EXPORT int name(void *handle, void *a, void *b, void *c, void *d, int algorithm, size_t *bytes) { \
        *bytes = 0;                                                                                    \
        return 0;                                                                                      \
    }
NEEDS_NO_WORKSPACE(cudnnGetConvolutionForwardWorkspaceSize)
NEEDS_NO_WORKSPACE(cudnnGetConvolutionBackwardDataWorkspaceSize)
NEEDS_NO_WORKSPACE(cudnnGetConvolutionBackwardFilterWorkspaceSize)

EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operation, void *x, void *z,
                                                                    void *y, void *scale, void *activation, size_t *bytes) {
    *bytes = 0;
    return 0;
}
EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operation, void *x, void *y, void *dy,
                                                             void *dz, void *dx, void *scale, void *activation, size_t *bytes) {
    *bytes = 0;
    return 0;
}
EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operation, void *activation, void *x,
                                                                size_t *bytes) {
    *bytes = 0;
    return 0;
}
