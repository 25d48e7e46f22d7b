// Sizes and offsets of include/deep_moe/layout, for Python: nothing is computed a second time.
#include <pybind11/stl.h>

#include <cstddef>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "deep_moe/layout/buffer.h"
#include "deep_moe/layout/smem.h"
#include "deep_moe/layout/tensor_maps.h"
#include "deep_moe/layout/weights.h"

namespace py = pybind11;

namespace deep_moe {
namespace {

// (name, dtype, shape, offset in bytes, size in bytes); shapes always have three dimensions
using FieldTuple = std::tuple<std::string, std::string, std::tuple<u64, u64, u64>, u64, u64>;

const char* dtype_name(Dtype dtype) {
    switch (dtype) {
        case Dtype::U8: return "u8";
        case Dtype::U16: return "u16";
        case Dtype::E4m3: return "e4m3";
        case Dtype::Bf16: return "bf16";
        case Dtype::I32: return "i32";
        case Dtype::U32: return "u32";
        case Dtype::U64: return "u64";
        case Dtype::F32: return "f32";
    }
    return "?";
}

FieldTuple field_tuple(const FieldSpec& field, u64 offset) {
    return {
        field.name, dtype_name(field.dtype), {field.shape[0], field.shape[1], field.shape[2]}, offset, field.bytes()};
}

std::vector<FieldTuple> buffer_fields(const MegaMoeConfig& config) {
    std::vector<FieldTuple> fields;
    for (u32 i = 0; i < u32(BufferField::kCount); ++i)
        fields.push_back(field_tuple(buffer_field_spec(config, BufferField(i)), buffer_offset(config, BufferField(i))));
    return fields;
}

std::vector<FieldTuple> smem_fields(const MegaMoeConfig& config) {
    std::vector<FieldTuple> fields;
    for (u32 i = 0; i < u32(SmemField::kCount); ++i)
        fields.push_back(field_tuple(smem_field_spec(config, SmemField(i)), smem_offset(config, SmemField(i))));
    return fields;
}

py::list tensor_maps(const MegaMoeConfig& config) {
    py::list maps;
    for (u32 i = 0; i < u32(MapIndex::kCount); ++i) {
        const TensorMapSpec spec = tensor_map_spec(config, MapIndex(i));
        py::dict map;
        map["name"] = spec.name;
        map["rank"] = spec.rank;
        map["dims"] = std::vector<u64>(spec.dims, spec.dims + spec.rank);
        map["strides"] = std::vector<u64>(spec.strides, spec.strides + spec.rank - 1);
        map["box"] = std::vector<u32>(spec.box, spec.box + spec.rank);
        maps.append(map);
    }
    return maps;
}

// (name, offset, size) of the words of the header that the host reads or writes
py::list header_fields() {
    py::list fields;
#define DM_HEADER_FIELD(name) \
    fields.append(py::make_tuple(#name, offsetof(BufferHeader, name), sizeof(BufferHeader::name)))
    DM_HEADER_FIELD(magic);
    DM_HEADER_FIELD(num_ranks);
    DM_HEADER_FIELD(layout_hash);
    DM_HEADER_FIELD(abort);
    DM_HEADER_FIELD(epoch);
    DM_HEADER_FIELD(num_tokens);
    DM_HEADER_FIELD(count_arrivals);
    DM_HEADER_FIELD(places_taken);
#undef DM_HEADER_FIELD
    return fields;
}

}  // namespace

void bind_layout(py::module_& m) {
    m.def("buffer_fields", &buffer_fields, "[(name, dtype, shape of 3, offset, bytes)] of the symmetric buffer.");
    m.def("buffer_bytes", &buffer_bytes, "Size of the symmetric buffer in bytes.");
    m.def("buffer_layout_hash", &buffer_layout_hash);
    m.def("header_fields", &header_fields, "[(name, offset, bytes)] of BufferHeader.");
    m.def("smem_fields", &smem_fields, "[(name, dtype, shape of 3, offset, bytes)] of a CTA's shared memory.");
    m.def("smem_bytes", [](const MegaMoeConfig& c) { return smem_bytes(c); });
    m.def("num_stages", &num_stages, "Pipeline stages that fit into shared memory.");
    m.def("scale_records", &scale_records, py::arg("k_blocks"), "Weight scale records of one tile.");
    m.def("l1_scale_records", &l1_scale_records, "Weight scale records of one expert's L1 matrix.");
    m.def("l2_scale_records", &l2_scale_records, "Weight scale records of one expert's L2 matrix.");
    m.def("l1_weight_bytes", &l1_weight_bytes, "Bytes of one expert's L1 matrix.");
    m.def("l2_weight_bytes", &l2_weight_bytes, "Bytes of one expert's L2 matrix.");
    m.def("l1_row_of", &l1_row_of, py::arg("channel"), py::arg("is_up"));
    m.def("l2_row_of", &l2_row_of, py::arg("channel"));
    m.def("weight_byte_of", &weight_byte_of, py::arg("k_blocks"), py::arg("row"), py::arg("k"));
    m.def("activation_byte_of", &activation_byte_of, py::arg("mma_type"), py::arg("k"));
    m.def("mxfp4_word_of", &mxfp4_word_of, py::arg("k_blocks"), py::arg("row"), py::arg("k"));
    m.def("mxfp4_element_of", &mxfp4_element_of, py::arg("k"));
    m.def("mxfp4_sign_bit_of", &mxfp4_sign_bit_of, py::arg("element"));
    m.def("mxfp4_exponent_byte_of", &mxfp4_exponent_byte_of, py::arg("k_blocks"), py::arg("row"), py::arg("k"));
    m.def("tensor_maps", &tensor_maps, "The tensor maps as dictionaries.");
    m.def("abort_record", &abort_record, py::arg("code"), py::arg("site"), py::arg("rank"), py::arg("index"));
}

}  // namespace deep_moe
