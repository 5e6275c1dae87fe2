// Compiles only if profiling/native/apexk_nvtx.h agrees with NVIDIA's own headers; for tests/test_nvtx.py, where those are installed.
#include <nvtx3/nvToolsExt.h>

#include <cstddef>

#include "apexk_nvtx.h"

using namespace apexk_nvtx::detail;

static_assert(sizeof(Attributes) == sizeof(nvtxEventAttributes_t));
static_assert(offsetof(Attributes, category) == offsetof(nvtxEventAttributes_t, category));
static_assert(offsetof(Attributes, color) == offsetof(nvtxEventAttributes_t, color));
static_assert(offsetof(Attributes, payload_type) == offsetof(nvtxEventAttributes_t, payloadType));
static_assert(offsetof(Attributes, payload) == offsetof(nvtxEventAttributes_t, payload));
static_assert(offsetof(Attributes, message_type) == offsetof(nvtxEventAttributes_t, messageType));
static_assert(offsetof(Attributes, message) == offsetof(nvtxEventAttributes_t, message));
static_assert(sizeof(Callbacks) == sizeof(NvtxExportTableCallbacks) && offsetof(Callbacks, get) == offsetof(NvtxExportTableCallbacks, GetModuleFunctionTable));
static_assert(sizeof(Version) == sizeof(NvtxExportTableVersionInfo) && offsetof(Version, version) == offsetof(NvtxExportTableVersionInfo, version));
static_assert(MODULES == NVTX_CB_MODULE_SIZE && CORE2 == NVTX_CB_MODULE_CORE2);
static_assert(FUNCTIONS[NVTX_CB_MODULE_CORE] == NVTX_CBID_CORE_SIZE && FUNCTIONS[NVTX_CB_MODULE_CUDA] == NVTX_CBID_CUDA_SIZE);
static_assert(FUNCTIONS[NVTX_CB_MODULE_OPENCL] == NVTX_CBID_OPENCL_SIZE && FUNCTIONS[NVTX_CB_MODULE_CUDART] == NVTX_CBID_CUDART_SIZE);
static_assert(FUNCTIONS[NVTX_CB_MODULE_CORE2] == NVTX_CBID_CORE2_SIZE && FUNCTIONS[NVTX_CB_MODULE_SYNC] == NVTX_CBID_SYNC_SIZE);
static_assert(int(PUSH) == int(NVTX_CBID_CORE2_DomainRangePushEx) && int(POP) == int(NVTX_CBID_CORE2_DomainRangePop));
static_assert(int(NAME_CATEGORY) == int(NVTX_CBID_CORE2_DomainNameCategoryA) && int(REGISTER_STRING) == int(NVTX_CBID_CORE2_DomainRegisterStringA));
static_assert(int(CREATE_DOMAIN) == int(NVTX_CBID_CORE2_DomainCreateA));
static_assert(NVTX_VERSION == 3 && NVTX_COLOR_ARGB == 1 && NVTX_PAYLOAD_TYPE_INT64 == 2 && NVTX_MESSAGE_TYPE_REGISTERED == 3);
static_assert(NVTX_ETID_CALLBACKS == 1 && NVTX_ETID_VERSIONINFO == 3);
