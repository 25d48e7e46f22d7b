// The tile order of include/deep_moe/sched, for tests and tools: the code that the kernel runs, called from Python.
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings.h"
#include "deep_moe/sched/decode_plan.h"

namespace py = pybind11;

namespace deep_moe {
namespace {

// (phase 1 or 2, expert, row block, tile of N, valid rows, ring slot)
using Task = std::tuple<u32, u32, u32, u32, u32, u32>;

struct AllExperts {
    const std::vector<u32>& received;

    u32 count() const { return u32(received.size()); }
    u32 id(u32 i) const { return i; }
    u32 rows(u32 i) const { return received[i]; }
};

std::vector<Task> task_order(const MegaMoeConfig& config, const std::vector<u32>& expert_rows, u32 num_sms, u32 cta) {
    if (const char* error = config_error(config)) throw std::invalid_argument(error);
    if (expert_rows.size() != config.experts_per_rank())
        throw std::invalid_argument("expert_rows needs one count per local expert");
    TaskOrder order(config, AllExperts{expert_rows}, config.unit_blocks);
    std::vector<Task> tasks;
    for (TileTask t = order.first(cta); t.kind != TaskKind::End; t = order.next(num_sms))
        tasks.emplace_back(t.kind == TaskKind::L1 ? 1 : 2, t.expert, t.block, t.n_tile, t.rows, t.ring_slot);
    return tasks;
}

// (phase 1 or 2, expert, tile of N, readers)
using Weights = std::tuple<u32, u32, u32, u32>;

std::vector<Weights> weight_order(const MegaMoeConfig& config, const std::vector<u32>& expert_rows, u32 unit_blocks) {
    TaskOrder order(config, AllExperts{expert_rows}, unit_blocks);
    std::vector<Weights> tiles;
    for (WeightTile t = order.weight_tile(0); t.kind != TaskKind::End; t = order.weight_tile(u32(tiles.size())))
        tiles.emplace_back(t.kind == TaskKind::L1 ? 1 : 2, t.expert, t.n_tile, t.readers);
    return tiles;
}

// (decoders, workers, unit_blocks, depth)
std::tuple<u32, u32, u32, u32> plan_of(const MegaMoeConfig& config, u32 ctas, u32 experts, u32 blocks) {
    const DecodePlan plan = decode_plan(config, ctas, experts, blocks);
    return {plan.decoders, plan.workers, plan.unit_blocks, plan.depth};
}

}  // namespace

void bind_sched(py::module_& m) {
    m.def("task_order", &task_order, py::arg("config"), py::arg("expert_rows"), py::arg("num_sms") = 1,
          py::arg("cta") = 0,
          "Tiles of one CTA in order: (phase 1 or 2, expert, row block, tile of N, valid rows, ring slot). "
          "expert_rows: received rows of every local expert.");
    m.def("weight_order", &weight_order, py::arg("config"), py::arg("expert_rows"), py::arg("unit_blocks"),
          "Weight tiles in the order in which they are decoded: (phase 1 or 2, expert, tile of N, readers).");
    m.def("decode_plan", &plan_of, py::arg("config"), py::arg("ctas"), py::arg("experts"), py::arg("blocks"),
          "How a launch shares out its CTAs: (decoders, workers, unit_blocks, depth). experts: that have rows.");
}

}  // namespace deep_moe
