// _C.driver: what Python needs of the CUDA driver.
#include <pybind11/stl.h>

#include "bindings.h"
#include "driver.h"

namespace py = pybind11;

namespace deep_moe {
namespace {

using cuda::Driver;

cuda::Device device_handle(int ordinal) {
    const Driver& driver = Driver::get();
    cuda::Device device = 0;
    driver.check(driver.device_get(&device, ordinal), "cuDeviceGet");
    return device;
}

// None when the driver can be used, else the reason why not.
py::object missing() {
    try {
        Driver::get();
    } catch (const cuda::DriverError& error) {
        return py::str(error.what());
    }
    return py::none();
}

int version() {
    int value = 0;
    Driver::get().check(Driver::get().driver_get_version(&value), "cuDriverGetVersion");
    return value;
}

int device_count() {
    int count = 0;
    Driver::get().check(Driver::get().device_get_count(&count), "cuDeviceGetCount");
    return count;
}

std::string device_name(int ordinal) {
    char name[256] = {};
    Driver::get().check(Driver::get().device_get_name(name, sizeof(name), device_handle(ordinal)), "cuDeviceGetName");
    return name;
}

int device_attribute(int ordinal, cuda::DeviceAttribute attribute) {
    int value = 0;
    Driver::get().check(Driver::get().device_get_attribute(&value, attribute, device_handle(ordinal)),
                        "cuDeviceGetAttribute");
    return value;
}

bool can_access_peer(int device, int peer) {
    int can = 0;
    Driver::get().check(Driver::get().device_can_access_peer(&can, device_handle(device), device_handle(peer)),
                        "cuDeviceCanAccessPeer");
    return can != 0;
}

void enable_peer_access(int device, int peer) {
    const Driver& driver = Driver::get();
    cuda::ScopedContext current(driver.primary_context(device));
    const cuda::Result result = driver.context_enable_peer_access(driver.primary_context(peer), 0);
    if (result != cuda::kErrorPeerAccessAlreadyEnabled) driver.check(result, "cuCtxEnablePeerAccess");
}

bool context_exists(int ordinal) {
    u32 flags = 0;
    int active = 0;
    Driver::get().check(Driver::get().primary_context_get_state(device_handle(ordinal), &flags, &active),
                        "cuDevicePrimaryCtxGetState");
    return active != 0;
}

u64 create_stream(int device) {
    const Driver& driver = Driver::get();
    cuda::ScopedContext current(driver.primary_context(device));
    cuda::Stream stream = nullptr;
    driver.check(driver.stream_create(&stream, cuda::kStreamNonBlocking), "cuStreamCreate");
    return reinterpret_cast<u64>(stream);
}

void destroy_stream(int device, u64 stream) {
    const Driver& driver = Driver::get();
    cuda::ScopedContext current(driver.primary_context(device));
    driver.check(driver.stream_destroy(reinterpret_cast<cuda::Stream>(stream)), "cuStreamDestroy");
}

void bind_kernel(py::module_& driver) {
    py::class_<cuda::Kernel>(driver, "Kernel", "A kernel loaded on one device, for the life of the process.")
        .def(py::init([](int device, const py::bytes& image, const std::string& name, const cuda::KernelInfo& info) {
                 return new cuda::Kernel(device, std::string(image), name, info);
             }),
             py::arg("device"), py::arg("image"), py::arg("name"), py::arg("info"),
             "info: (buffer layout hash, shared memory bytes, threads, kernel kind) that the cubin must state.")
        .def_property_readonly("device", &cuda::Kernel::device)
        .def_property_readonly("threads", &cuda::Kernel::threads)
        .def_property_readonly("shared_bytes", &cuda::Kernel::shared_bytes)
        .def_property_readonly("blocks_per_sm", &cuda::Kernel::blocks_per_sm)
        .def_property_readonly("registers",
                               [](const cuda::Kernel& k) { return k.attribute(cuda::FunctionAttribute::NumRegisters); })
        .def_property_readonly("local_bytes",
                               [](const cuda::Kernel& k) { return k.attribute(cuda::FunctionAttribute::LocalBytes); });
}

}  // namespace

void bind_driver(py::module_& m) {
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const cuda::DriverError& error) {
            py::set_error(py::module_::import("deep_moe.errors").attr("DeviceError"), error.what());
        }
    });
    py::module_ driver = m.def_submodule("driver", "The CUDA driver (libcuda.so.1), loaded at the first call.");
    py::enum_<cuda::DeviceAttribute>(driver, "DeviceAttribute")
        .value("MultiprocessorCount", cuda::DeviceAttribute::MultiprocessorCount)
        .value("ComputeCapabilityMajor", cuda::DeviceAttribute::ComputeCapabilityMajor)
        .value("ComputeCapabilityMinor", cuda::DeviceAttribute::ComputeCapabilityMinor)
        .value("MaxSharedMemoryPerBlockOptin", cuda::DeviceAttribute::MaxSharedMemoryPerBlockOptin);
    driver.def("missing", &missing, "None when the driver can be used, else a sentence that says why not.");
    driver.def("version", &version, "CUDA version of the driver, e.g. 13000.");
    driver.def("device_count", &device_count);
    driver.def("device_name", &device_name, py::arg("device"));
    driver.def("device_attribute", &device_attribute, py::arg("device"), py::arg("attribute"));
    driver.def("can_access_peer", &can_access_peer, py::arg("device"), py::arg("peer"));
    driver.def("enable_peer_access", &enable_peer_access, py::arg("device"), py::arg("peer"),
               "Lets kernels on `device` use memory of `peer`; harmless when they already can.");
    driver.def("context_exists", &context_exists, py::arg("device"), "Whether the primary context is active.");
    driver.def("create_stream", &create_stream, py::arg("device"), "A non-blocking stream, as an integer.");
    driver.def("destroy_stream", &destroy_stream, py::arg("device"), py::arg("stream"));
    bind_kernel(driver);
}

}  // namespace deep_moe
