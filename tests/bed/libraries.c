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

/* cuDNN's graph interface: a heuristic finds one engine, whose plan needs no workspace; all other attributes are zeros. */
enum { BACKEND_DESCRIPTOR = 15, ENGINE_HEURISTICS_RESULTS = 202 };
static size_t attribute_bytes(int type) { /* of cudnnBackendAttributeType_t; the other types have 4 bytes */
    switch (type) {
    case 0: case 3: case 5: case 6: return 8; /* handle, int64, double, void pointer */
    case 2: case 26: return 1;                /* boolean, char */
    case BACKEND_DESCRIPTOR: return 0;        /* the caller has made them */
    default: return 4;
    }
}
EXPORT int cudnnBackendCreateDescriptor(int type, void **made) {
    *made = calloc(1, 64);
    return 0;
}
EXPORT int cudnnBackendDestroyDescriptor(void *made) {
    free(made);
    return 0;
}
EXPORT int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t asked, int64_t *count, void *array) {
    int finds_one = type == BACKEND_DESCRIPTOR || asked == 1;
    if (count) *count = finds_one ? 1 : 0;
    if (array && finds_one) memset(array, 0, attribute_bytes(type));
    return 0;
}
