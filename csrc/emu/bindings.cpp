// deep_moe._C.emu: worlds, launches and tensor maps for Python (used by the CPU ranks and by the emulator's own tests).
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "world.h"

namespace py = pybind11;

namespace deep_moe {

namespace {

using namespace emu;

const char* exception_name(FaultKind kind) {
    switch (kind) {
        case FaultKind::Deadlock: return "Deadlock";
        case FaultKind::OutOfBounds: return "OutOfBounds";
        case FaultKind::Protocol:
        case FaultKind::Race: return "Protocol";
        default: return "EmulatorFault";
    }
}

// Faults become the exceptions of deep_moe/errors.py, or RuntimeError when the package is not there.
void translate(std::exception_ptr p) {
    try {
        if (p) std::rethrow_exception(p);
    } catch (const Fault& fault) {
        PyObject* type = PyExc_RuntimeError;
        py::object found;
        try {
            found = py::module_::import("deep_moe.errors").attr(exception_name(fault.kind));
            type = found.ptr();
        } catch (py::error_already_set&) {
        }
        PyErr_SetString(type, fault.what());
    }
}

u8* pointer(u64 address) { return reinterpret_cast<u8*>(address); }

py::dict counts_dict(const Counts& c) {
    py::dict d;
    d["wgmma"] = c.wgmma;
    d["tma_loads"] = c.tma_loads;
    d["bulk_loads"] = c.bulk_loads;
    d["bulk_stores"] = c.bulk_stores;
    d["mbarrier_arrivals"] = c.mbarrier_arrivals;
    d["mbarrier_waits"] = c.mbarrier_waits;
    d["switches"] = c.switches;
    d["macs"] = c.macs;
    return d;
}

py::dict launch(World& world, u32 rank, const std::string& name, u64 entry, u32 num_sms, u32 threads, u32 smem_bytes,
                const std::vector<py::bytes>& args,
                const std::vector<std::tuple<std::string, u64, u64, bool, i32>>& regions,
                const std::vector<std::tuple<std::string, u32, u32>>& smem_fields, const Options& options,
                u32 cluster_size) {
    LaunchRequest r;
    r.rank = rank;
    r.name = name;
    r.entry = reinterpret_cast<void*>(entry);
    r.num_sms = num_sms;
    r.threads = threads;
    r.cluster_size = cluster_size;
    r.smem_bytes = smem_bytes;
    for (const py::bytes& b : args) {
        const std::string text = b;
        r.args.emplace_back(text.begin(), text.end());
    }
    for (const auto& [n, base, bytes, writable, of_rank] : regions)
        r.regions.push_back({n, pointer(base), bytes, writable, of_rank});
    for (const auto& [n, offset, bytes] : smem_fields) r.smem_fields.push_back({n, offset, bytes, false});
    Counts counts;
    {
        py::gil_scoped_release release;
        counts = world.launch(r, options);
    }
    return counts_dict(counts);
}

// Address of a function of a shared object; the object stays loaded.
u64 load_function(const std::string& path, const std::string& function) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw std::runtime_error(std::string("dlopen: ") + dlerror());
    void* symbol = dlsym(handle, function.c_str());
    if (!symbol) throw std::runtime_error("no function " + function + " in " + path);
    return reinterpret_cast<u64>(symbol);
}

py::bytes encode(const std::vector<u64>& dims, const std::vector<u64>& strides, const std::vector<u32>& box, u64 base,
                 const std::string& name) {
    TensorMapSpec spec{name.c_str(), u32(dims.size()), {1, 1, 1}, {0, 0}, {1, 1, 1}};
    if (dims.size() > 3 || strides.size() > 2 || box.size() > 3) throw py::value_error("at most three dimensions");
    std::copy(dims.begin(), dims.end(), spec.dims);
    std::copy(strides.begin(), strides.end(), spec.strides);
    std::copy(box.begin(), box.end(), spec.box);
    const TensorMap map = encode_tensor_map(spec, pointer(base));
    return py::bytes(reinterpret_cast<const char*>(&map), sizeof(map));
}

}  // namespace

void bind_emulator(py::module_& m) {
    py::module_ e = m.def_submodule("emu", "The CPU emulator: ranks as memory arenas, threads as fibers.");
    py::register_exception_translator(translate);

    py::class_<Options>(e, "Options", "How a launch is emulated.")
        .def(py::init([](u64 seed, bool weak_memory, bool async_effects, double host_wait_s) {
                 return Options{seed, weak_memory, async_effects, host_wait_s};
             }),
             py::kw_only(), py::arg("seed") = 0, py::arg("weak_memory") = true, py::arg("async_effects") = true,
             py::arg("host_wait_s") = 600.0)
        .def_readonly("seed", &Options::seed)
        .def_readonly("weak_memory", &Options::weak_memory)
        .def_readonly("async_effects", &Options::async_effects)
        .def_readonly("host_wait_s", &Options::host_wait_s);

    py::class_<World>(e, "World", "Ranks of one process that share memory.")
        .def(py::init<u32>(), py::arg("num_ranks"))
        .def_property_readonly("num_ranks", &World::num_ranks)
        .def(
            "allocate",
            [](World& w, u32 rank, u64 bytes, const std::string& name) {
                return reinterpret_cast<u64>(w.allocate(rank, bytes, name));
            },
            py::arg("rank"), py::arg("bytes"), py::arg("name"), "Address of page-aligned memory, filled with 0x7f.")
        .def(
            "release", [](World& w, u64 base) { w.release(pointer(base)); }, py::arg("base"))
        .def("launch", &launch, py::arg("rank"), py::arg("name"), py::arg("entry"), py::arg("num_sms"),
             py::arg("threads"), py::arg("smem_bytes"), py::arg("args"), py::arg("regions"), py::arg("smem_fields"),
             py::arg("options"), py::arg("cluster_size") = 1,
             "Runs a grid of one rank and returns its counts. regions: (name, address, bytes, writable, rank); "
             "smem_fields: (name, offset, bytes).")
        .def("rank_ended", &World::rank_ended, py::arg("rank"), py::arg("why"),
             py::call_guard<py::gil_scoped_release>())
        .def("rank_started", &World::rank_started, py::arg("rank"), py::call_guard<py::gil_scoped_release>())
        .def("rank_blocked", &World::rank_blocked, py::arg("rank"), py::arg("blocked"),
             py::call_guard<py::gil_scoped_release>());

    e.def("load_function", &load_function, py::arg("path"), py::arg("function"));
    e.def("encode_tensor_map", &encode, py::arg("dims"), py::arg("strides"), py::arg("box"), py::arg("base"),
          py::arg("name") = "map", "128 bytes for tma_load_*: e4m3 elements, 128-byte swizzle, zero fill.");
}

}  // namespace deep_moe
