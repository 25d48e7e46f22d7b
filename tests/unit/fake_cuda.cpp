// A libcuda.so.1 for tests of the host side: keeps contexts, streams and captures as numbers and writes a line to the
// file in FAKE_CUDA_LOG for every call that matters.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    void* attributes;
    unsigned num_attributes;
};

uintptr_t current_context = 0;
uintptr_t next_event = 0x5000;

void log(const char* format, ...) {
    static FILE* file = std::fopen(std::getenv("FAKE_CUDA_LOG"), "a");
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(file, format, arguments);
    va_end(arguments);
    std::fputc('\n', file);
    std::fflush(file);
}

unsigned number(const void* p) { return unsigned(reinterpret_cast<uintptr_t>(p)); }

}  // namespace

extern "C" {
int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int, const char** text) { return *text = "made up", 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < 2 ? 0 : 101; }
int cuDeviceGetName(char* name, int length, int) { return std::snprintf(name, length, "Fake GPU"), 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 16 ? 132 : 9, 0; }
int cuDeviceCanAccessPeer(int* can, int, int) { return *can = 0, 0; }
int cuDevicePrimaryCtxGetState(int, unsigned*, int* active) { return *active = 1, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = reinterpret_cast<void*>(uintptr_t(0x100 + device));
    return 0;
}
int cuCtxGetCurrent(void** context) { return *context = reinterpret_cast<void*>(current_context), 0; }
int cuCtxPushCurrent_v2(void* context) {
    current_context = reinterpret_cast<uintptr_t>(context);
    return 0;
}
int cuCtxPopCurrent_v2(void**) { return current_context = 0, 0; }
int cuCtxEnablePeerAccess(void*, unsigned) { return 704; }
int cuStreamCreate(void** stream, unsigned flags) {
    *stream = reinterpret_cast<void*>(uintptr_t(0x900 + flags));
    return 0;
}
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    return log("wait stream %x event %x", number(stream), number(event)), 0;
}
// Streams from 0xc00 on are capturing; the second hexadecimal digit names the capture.
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void**, const void**, size_t*) {
    const unsigned value = number(stream);
    *status = value >= 0xc00;
    *id = value >> 4;
    return 0;
}
int cuEventCreate(void** event, unsigned) { return *event = reinterpret_cast<void*>(next_event++), 0; }
int cuEventDestroy_v2(void*) { return 0; }
int cuEventRecord(void* event, void* stream) {
    return log("record event %x stream %x", number(event), number(stream)), 0;
}
int cuModuleLoadData(void** module, const void* image) { return *module = const_cast<void*>(image), 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
    return log("function %s", name), *function = module, 0;
}
// The image holds the four words of deep_moe_info.
int cuModuleGetGlobal_v2(unsigned long long* address, size_t* bytes, void* module, const char*) {
    static unsigned long long words[64][4];
    static int used = 0;
    std::memcpy(words[used], module, 32);
    *address = reinterpret_cast<uintptr_t>(words[used++]);
    *bytes = 32;
    return 0;
}
int cuMemcpyDtoH_v2(void* host, unsigned long long device, size_t bytes) {
    return std::memcpy(host, reinterpret_cast<void*>(uintptr_t(device)), bytes), 0;
}
int cuFuncGetAttribute(int* value, int attribute, void*) { return *value = attribute == 4 ? 168 : 0, 0; }
int cuFuncSetAttribute(void*, int attribute, int value) { return log("set attribute %d %d", attribute, value), 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) { return *blocks = 1, 0; }
int cuLaunchKernelEx(const LaunchConfig* c, void*, void** params, void**) {
    const char* text = static_cast<const char*>(params[0]);
    unsigned long long first = 0;
    std::memcpy(&first, text, 8);
    return log("launch context %x grid %u,%u,%u block %u,%u,%u shared %u stream %x attributes %u first %llx",
               unsigned(current_context), c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2],
               c->shared_bytes, number(c->stream), c->num_attributes, first),
           0;
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const unsigned long long* dims,
                           const unsigned long long* strides, const unsigned* box, const unsigned* element_strides,
                           int interleave, int swizzle, int promotion, int fill) {
    return log("map aligned %d type %d rank %u address %x dims %llu,%llu,%llu strides %llu,%llu box %u,%u,%u element "
               "%u,%u,%u modes %d,%d,%d,%d",
               int(reinterpret_cast<uintptr_t>(map) % 64 == 0), type, rank, number(address), dims[0], dims[1],
               rank > 2 ? dims[2] : 0, strides[0], rank > 2 ? strides[1] : 0, box[0], box[1], rank > 2 ? box[2] : 0,
               element_strides[0], element_strides[1], element_strides[2], interleave, swizzle, promotion, fill),
           0;
}
}
