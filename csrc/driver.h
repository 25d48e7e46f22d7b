// The CUDA driver, found at run time with dlopen: importing the package needs no driver, and no cuda.h is needed to
// build. Only what the host side calls is declared; names and layouts follow the CUDA driver API (12.0 or later).
#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "deep_moe/layout/params.h"

namespace deep_moe::cuda {

using Result = int;     // CUresult; 0 is success
using Device = int;     // CUdevice
using DevicePtr = u64;  // CUdeviceptr
using Context = struct ContextImpl*;
using Module = struct ModuleImpl*;
using Function = struct FunctionImpl*;
using Stream = struct StreamImpl*;
using Event = struct EventImpl*;

constexpr Result kErrorPeerAccessAlreadyEnabled = 704;
constexpr u32 kStreamNonBlocking = 1;
constexpr u32 kEventDisableTiming = 2;
constexpr int kCaptureStatusActive = 1;

enum class DeviceAttribute : int {
    MultiprocessorCount = 16,
    ComputeCapabilityMajor = 75,
    ComputeCapabilityMinor = 76,
    MaxSharedMemoryPerBlockOptin = 97,
};

enum class FunctionAttribute : int {
    MaxThreadsPerBlock = 0,
    SharedBytes = 1,
    LocalBytes = 3,
    NumRegisters = 4,
    MaxDynamicSharedBytes = 8,
};

// CUlaunchAttribute
constexpr u32 kProgrammaticStreamSerialization = 6;
struct LaunchAttribute {
    u32 id;
    u32 padding[1];
    u32 value[16];
};
static_assert(sizeof(LaunchAttribute) == 72);

// CUlaunchConfig
struct LaunchConfig {
    u32 grid[3];
    u32 block[3];
    u32 shared_bytes;
    Stream stream;
    LaunchAttribute* attributes;
    u32 num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56);

// X(exported symbol, name here, arguments); all return a Result
#define DM_DRIVER_FUNCTIONS(X)                                                                                         \
    X("cuInit", init, (u32 flags))                                                                                     \
    X("cuDriverGetVersion", driver_get_version, (int* version))                                                        \
    X("cuDeviceGetCount", device_get_count, (int* count))                                                              \
    X("cuDeviceGet", device_get, (Device * device, int ordinal))                                                       \
    X("cuDeviceGetName", device_get_name, (char* name, int length, Device device))                                     \
    X("cuDeviceGetAttribute", device_get_attribute, (int* value, DeviceAttribute attribute, Device device))            \
    X("cuDeviceCanAccessPeer", device_can_access_peer, (int* can, Device device, Device peer))                         \
    X("cuDevicePrimaryCtxGetState", primary_context_get_state, (Device device, u32 * flags, int* active))              \
    X("cuDevicePrimaryCtxRetain", primary_context_retain, (Context * context, Device device))                          \
    X("cuCtxGetCurrent", context_get_current, (Context * context))                                                     \
    X("cuCtxPushCurrent_v2", context_push, (Context context))                                                          \
    X("cuCtxPopCurrent_v2", context_pop, (Context * context))                                                          \
    X("cuCtxEnablePeerAccess", context_enable_peer_access, (Context peer, u32 flags))                                  \
    X("cuStreamCreate", stream_create, (Stream * stream, u32 flags))                                                   \
    X("cuStreamDestroy_v2", stream_destroy, (Stream stream))                                                           \
    X("cuStreamWaitEvent", stream_wait_event, (Stream stream, Event event, u32 flags))                                 \
    X("cuStreamGetCaptureInfo_v2", stream_get_capture_info,                                                            \
      (Stream stream, int* status, u64* id, void** graph, const void** dependencies, size_t* num_dependencies))        \
    X("cuEventCreate", event_create, (Event * event, u32 flags))                                                       \
    X("cuEventDestroy_v2", event_destroy, (Event event))                                                               \
    X("cuEventRecord", event_record, (Event event, Stream stream))                                                     \
    X("cuModuleLoadData", module_load_data, (Module * module, const void* image))                                      \
    X("cuModuleGetFunction", module_get_function, (Function * function, Module module, const char* name))              \
    X("cuModuleGetGlobal_v2", module_get_global, (DevicePtr * address, size_t* bytes, Module module, const char* n))   \
    X("cuMemcpyDtoH_v2", memcpy_to_host, (void* host, DevicePtr device, size_t bytes))                                 \
    X("cuFuncGetAttribute", function_get_attribute, (int* value, FunctionAttribute attribute, Function function))      \
    X("cuFuncSetAttribute", function_set_attribute, (Function function, FunctionAttribute attribute, int value))       \
    X("cuOccupancyMaxActiveBlocksPerMultiprocessor", occupancy,                                                        \
      (int* blocks, Function function, int threads, size_t shared_bytes))                                              \
    X("cuLaunchKernelEx", launch_kernel, (const LaunchConfig* config, Function function, void** params, void** extra)) \
    X("cuTensorMapEncodeTiled", tensor_map_encode_tiled,                                                               \
      (TensorMap * map, int data_type, u32 rank, void* address, const u64* dims, const u64* strides, const u32* box,   \
       const u32* element_strides, int interleave, int swizzle, int l2_promotion, int oob_fill))

// A call failed, or there is no driver. Python sees deep_moe.errors.DeviceError.
struct DriverError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Driver {
public:
    // Loads and initialises libcuda.so.1 once; throws DriverError that says what is missing.
    static const Driver& get();

    // Throws DriverError with the driver's own text when result is not success.
    void check(Result result, const char* what) const;

    // Retained for the life of the process.
    Context primary_context(int device) const;

#define DM_DECLARE(symbol, name, arguments) Result(*name) arguments = nullptr;
    DM_DRIVER_FUNCTIONS(DM_DECLARE)
#undef DM_DECLARE

private:
    Driver();

    Result (*get_error_name_)(Result, const char**) = nullptr;
    Result (*get_error_string_)(Result, const char**) = nullptr;
};

// Makes a context current for the scope; free when it already is.
class ScopedContext {
public:
    explicit ScopedContext(Context context);
    ~ScopedContext();
    ScopedContext(const ScopedContext&) = delete;
    ScopedContext& operator=(const ScopedContext&) = delete;

private:
    bool pushed_ = false;
};

using KernelInfo = std::array<u64, 4>;  // deep_moe_info: layout hash, shared bytes, threads, kernel kind

// Throws DriverError that names the first word that differs. kernel: for the message.
void check_kernel_info(const std::string& kernel, const KernelInfo& found, const KernelInfo& expected);

// A kernel of a cubin, loaded into a device's primary context for the life of the process: graphs may hold it.
class Kernel {
public:
    // Throws DriverError when the device cannot run the image, or when deep_moe_info is not `expected`.
    Kernel(int device, const std::string& image, const std::string& name, const KernelInfo& expected);

    // params: one pointer per kernel argument. overlaps: may be started before the kernel in front of it has ended, and
    // waits by itself (hw::wait_for_predecessors).
    void launch(u32 grid, Stream stream, void** params, bool overlaps = false) const;

    int device() const { return device_; }
    Context context() const { return context_; }
    u32 threads() const { return u32(expected_[2]); }
    u32 shared_bytes() const { return u32(expected_[1]); }
    int attribute(FunctionAttribute attribute) const;
    // Blocks of this kernel that one SM holds at a time.
    int blocks_per_sm() const;

private:
    void check_info(const std::string& name) const;

    int device_;
    KernelInfo expected_;
    Context context_ = nullptr;
    Module module_ = nullptr;
    Function function_ = nullptr;
};

// e4m3 bytes, 128-byte swizzle, zero fill; address: device pointer, 16-byte aligned. Writes to `map`, which must be
// aligned as its type says: the driver demands 64 bytes, and g++ 12 does not align a returned temporary.
void encode_tensor_map(const TensorMapSpec& spec, u64 address, TensorMap& map);

}  // namespace deep_moe::cuda
