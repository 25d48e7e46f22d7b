// _C.Config (MegaMoeConfig), its enums and the constants of layout/config.h.
#include <functional>

#include "bindings.h"
#include "config_fields.h"
#include "deep_moe/layout/buffer.h"
#include "deep_moe/layout/smem.h"
#include "deep_moe/layout/weights.h"

namespace py = pybind11;

namespace deep_moe {
namespace {

// Sets the fields named in kwargs; an unknown name is a TypeError, as with a keyword-only Python function.
MegaMoeConfig with_fields(MegaMoeConfig config, const py::kwargs& kwargs) {
    size_t used = 0;
    visit_config_fields([&](const char* name, auto member) {
        if (!kwargs.contains(name)) return;
        using Field = std::remove_reference_t<decltype(config.*member)>;
        config.*member = kwargs[name].cast<Field>();
        ++used;
    });
    if (used == kwargs.size()) return config;
    for (const auto& item : kwargs) {
        const auto key = item.first.cast<std::string>();
        bool known = false;
        visit_config_fields([&](const char* name, auto) { known |= key == name; });
        if (!known) throw py::type_error("Config has no field '" + key + "'");
    }
    return config;
}

py::dict as_dict(const MegaMoeConfig& config) {
    py::dict fields;
    visit_config_fields([&](const char* name, auto member) { fields[name] = config.*member; });
    return fields;
}

std::string repr(const MegaMoeConfig& config) {
    std::string text = "Config(";
    for (const auto& item : as_dict(config)) {
        if (text.back() != '(') text += ", ";
        text += item.first.cast<std::string>() + "=" + py::str(item.second).cast<std::string>();
    }
    return text + ")";
}

void bind_config_methods(py::class_<MegaMoeConfig>& cls) {
    cls.def(py::init([](const py::kwargs& kwargs) { return with_fields(MegaMoeConfig{}, kwargs); }));
    visit_config_fields([&](const char* name, auto member) { cls.def_readonly(name, member); });
    cls.def("replace", &with_fields, "A copy with the named fields changed.");
    cls.def("literal", &config_literal, "C++ source of this value, for a template argument.");
    cls.def("as_dict", &as_dict);
    cls.def("error", &config_error, "The first rule this configuration breaks, or None.");
    cls.def("__eq__", [](const MegaMoeConfig& a, const MegaMoeConfig& b) { return a == b; }, py::is_operator());
    cls.def("__hash__", [](const MegaMoeConfig& c) { return std::hash<std::string>()(config_literal(c)); });
    cls.def("__repr__", &repr);
    cls.def_property_readonly("experts_per_rank", &MegaMoeConfig::experts_per_rank);
    cls.def_property_readonly("l1_k_blocks", &MegaMoeConfig::l1_k_blocks);
    cls.def_property_readonly("l2_k_blocks", &MegaMoeConfig::l2_k_blocks);
    cls.def_property_readonly("l1_n_tiles", &MegaMoeConfig::l1_n_tiles);
    cls.def_property_readonly("l2_n_tiles", &MegaMoeConfig::l2_n_tiles);
    cls.def_property_readonly("l1_weight_tiles", &MegaMoeConfig::l1_weight_tiles);
    cls.def_property_readonly("l2_weight_tiles", &MegaMoeConfig::l2_weight_tiles);
    cls.def_property_readonly("swaps_operands", &MegaMoeConfig::swaps_operands);
    cls.def_property_readonly("decodes_ahead", &MegaMoeConfig::decodes_ahead);
    cls.def_property_readonly("has_decode_warps", &MegaMoeConfig::has_decode_warps);
    cls.def_property_readonly("min_ctas", &MegaMoeConfig::min_ctas);
    cls.def_property_readonly("num_threads", &MegaMoeConfig::num_threads);
    cls.def_property_readonly("padded_intermediate", &MegaMoeConfig::padded_intermediate);
    cls.def_property_readonly("max_recv_rows", &MegaMoeConfig::max_recv_rows);
    cls.def_property_readonly("max_blocks", &MegaMoeConfig::max_blocks);
    cls.def_property_readonly("ring_blocks", &MegaMoeConfig::ring_blocks);
    cls.def("max_blocks_of", &MegaMoeConfig::max_blocks_of, py::arg("rows_per_block"));
}

}  // namespace

void bind_config(py::module_& m) {
    py::enum_<MmaType>(m, "MmaType").value("Fp8xFp8", MmaType::Fp8xFp8).value("Fp8xMxfp4", MmaType::Fp8xMxfp4);
    py::enum_<Activation>(m, "Activation")
        .value("SwiGLU", Activation::SwiGLU)
        .value("SwiGLUOai", Activation::SwiGLUOai);
    py::enum_<AbortCode>(m, "AbortCode")
        .value("None_", AbortCode::None)
        .value("Timeout", AbortCode::Timeout)
        .value("BoundMismatch", AbortCode::BoundMismatch);
    py::enum_<WaitSite>(m, "WaitSite")
        .value("None_", WaitSite::None)
        .value("RouteCounts", WaitSite::RouteCounts)
        .value("CountFlag", WaitSite::CountFlag)
        .value("RingSlot", WaitSite::RingSlot)
        .value("RowsArrived", WaitSite::RowsArrived)
        .value("L1Done", WaitSite::L1Done)
        .value("DoneFlag", WaitSite::DoneFlag)
        .value("Pipeline", WaitSite::Pipeline)
        .value("DecodedChunk", WaitSite::DecodedChunk)
        .value("DecodedSlot", WaitSite::DecodedSlot);
    py::class_<MegaMoeConfig> config(m, "Config", "MegaMoeConfig of include/deep_moe/layout/config.h.");
    bind_config_methods(config);
    m.def("weight_block_bytes", &weight_block_bytes, py::arg("mma_type"), "Bytes of 256 weight rows and 128 of K.");

#define DM_CONSTANT(name) m.attr(#name) = py::int_(u64(name))
    DM_CONSTANT(kMaxRanks);
    DM_CONSTANT(kMaxExperts);
    DM_CONSTANT(kMaxTopk);
    DM_CONSTANT(kBlockK);
    DM_CONSTANT(kBlockN);
    DM_CONSTANT(kScaleGroup);
    DM_CONSTANT(kSwappedBlockM);
    DM_CONSTANT(kDecodedBlockM);
    DM_CONSTANT(kChunkBlocks);
    DM_CONSTANT(kMinDecodedSlots);
    DM_CONSTANT(kNumDispatchWarps);
    DM_CONSTANT(kBufferMagic);
    DM_CONSTANT(kMaxSmemBytes);
    DM_CONSTANT(kTaskDepth);
    DM_CONSTANT(kMaxRowBuffers);
    DM_CONSTANT(kMaxStages);
    DM_CONSTANT(kWeightScaleRecord);
    DM_CONSTANT(kMxfp4Group);
    DM_CONSTANT(kMxfp4Pieces);
    DM_CONSTANT(kMxfp4PieceBytes);
    DM_CONSTANT(kMxfp4CodeBytes);
    DM_CONSTANT(kMxfp4ExponentBias);
    DM_CONSTANT(kMxfp4MaxExponent);
    DM_CONSTANT(kL1GroupChannels);
    DM_CONSTANT(kL2GroupChannels);
#undef DM_CONSTANT
}

}  // namespace deep_moe
