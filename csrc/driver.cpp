#include "driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace deep_moe::cuda {
namespace {

void* find_symbol(void* library, const char* symbol) {
    void* address = dlsym(library, symbol);
    if (!address)
        throw DriverError(std::string("the CUDA driver (libcuda.so.1) has no ") + symbol +
                          "; deep_moe needs a driver for CUDA 12.0 or later");
    return address;
}

}  // namespace

Driver::Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        throw DriverError(std::string("no CUDA driver: ") + dlerror() +
                          "; install an NVIDIA driver, or use CPU tensors (the emulator)");
    get_error_name_ = reinterpret_cast<decltype(get_error_name_)>(find_symbol(library, "cuGetErrorName"));
    get_error_string_ = reinterpret_cast<decltype(get_error_string_)>(find_symbol(library, "cuGetErrorString"));
#define DM_LOAD(symbol, name, arguments) name = reinterpret_cast<decltype(name)>(find_symbol(library, symbol));
    DM_DRIVER_FUNCTIONS(DM_LOAD)
#undef DM_LOAD
    check(init(0), "cuInit");
}

const Driver& Driver::get() {
    static const Driver driver;  // a failed construction is tried again by the next call
    return driver;
}

void Driver::check(Result result, const char* what) const {
    if (result == 0) return;
    const char* name = nullptr;
    const char* text = nullptr;
    get_error_name_(result, &name);
    get_error_string_(result, &text);
    throw DriverError(std::string(what) + " failed: " + (name ? name : "CUDA error " + std::to_string(result)) + " (" +
                      (text ? text : "no description") + ")");
}

Context Driver::primary_context(int ordinal) const {
    static std::mutex mutex;
    static std::map<int, Context> contexts;
    std::lock_guard lock(mutex);
    Context& context = contexts[ordinal];
    if (!context) {
        Device device = 0;
        check(device_get(&device, ordinal), "cuDeviceGet");
        check(primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
    }
    return context;
}

ScopedContext::ScopedContext(Context context) {
    const Driver& driver = Driver::get();
    Context current = nullptr;
    driver.check(driver.context_get_current(&current), "cuCtxGetCurrent");
    if (current == context) return;
    driver.check(driver.context_push(context), "cuCtxPushCurrent");
    pushed_ = true;
}

ScopedContext::~ScopedContext() {
    Context popped = nullptr;
    if (pushed_) Driver::get().context_pop(&popped);
}

void check_kernel_info(const std::string& kernel, const KernelInfo& found, const KernelInfo& expected) {
    static const char* const kWhat[4] = {"buffer layout hash", "shared memory bytes", "threads", "kernel kind"};
    for (u32 i = 0; i < 4; ++i)
        if (found[i] != expected[i])
            throw DriverError("kernel " + kernel + " was built for another " + kWhat[i] + ": it says " +
                              std::to_string(found[i]) + ", this build of deep_moe needs " +
                              std::to_string(expected[i]) + "; remove it from the kernel cache");
}

Kernel::Kernel(int device, const std::string& image, const std::string& name, const KernelInfo& expected)
    : device_(device), expected_(expected) {
    const Driver& driver = Driver::get();
    context_ = driver.primary_context(device);
    ScopedContext current(context_);
    driver.check(driver.module_load_data(&module_, image.data()), "cuModuleLoadData");
    driver.check(driver.module_get_function(&function_, module_, name.c_str()), "cuModuleGetFunction");
    check_info(name);
    driver.check(
        driver.function_set_attribute(function_, FunctionAttribute::MaxDynamicSharedBytes, int(shared_bytes())),
        "cuFuncSetAttribute(max dynamic shared memory)");
    if (blocks_per_sm() < 1)
        throw DriverError("kernel " + name + " does not fit on an SM of device " + std::to_string(device) + ": " +
                          std::to_string(threads()) + " threads, " + std::to_string(shared_bytes()) +
                          " bytes of shared memory, " + std::to_string(attribute(FunctionAttribute::NumRegisters)) +
                          " registers");
}

void Kernel::check_info(const std::string& name) const {
    const Driver& driver = Driver::get();
    DevicePtr address = 0;
    size_t bytes = 0;
    driver.check(driver.module_get_global(&address, &bytes, module_, "deep_moe_info"),
                 "cuModuleGetGlobal(deep_moe_info)");
    KernelInfo found{};
    if (bytes != sizeof(found))
        throw DriverError("kernel " + name + ": deep_moe_info has " + std::to_string(bytes) + " bytes, expected 32");
    driver.check(driver.memcpy_to_host(found.data(), address, bytes), "cuMemcpyDtoH(deep_moe_info)");
    check_kernel_info(name, found, expected_);
}

int Kernel::attribute(FunctionAttribute attribute) const {
    const Driver& driver = Driver::get();
    ScopedContext current(context_);
    int value = 0;
    driver.check(driver.function_get_attribute(&value, attribute, function_), "cuFuncGetAttribute");
    return value;
}

int Kernel::blocks_per_sm() const {
    const Driver& driver = Driver::get();
    ScopedContext current(context_);
    int blocks = 0;
    driver.check(driver.occupancy(&blocks, function_, int(threads()), shared_bytes()),
                 "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    return blocks;
}

void Kernel::launch(u32 grid, Stream stream, void** params, bool overlaps) const {
    const Driver& driver = Driver::get();
    ScopedContext current(context_);
    LaunchAttribute overlap{kProgrammaticStreamSerialization, {}, {1}};
    const LaunchConfig config{{grid, 1, 1}, {threads(), 1, 1}, shared_bytes(), stream, &overlap, overlaps ? 1u : 0u};
    driver.check(driver.launch_kernel(&config, function_, params, nullptr), "cuLaunchKernelEx");
}

}  // namespace deep_moe::cuda
