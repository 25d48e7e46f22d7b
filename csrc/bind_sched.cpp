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

}  // namespace

void bind_sched(py::module_& m) {
    m.def("task_order", &task_order, py::arg("config"), py::arg("expert_rows"), py::arg("num_sms") = 1,
          py::arg("cta") = 0,
          "Tiles of one CTA in order: (phase 1 or 2, expert, row block, tile of N, valid rows, ring slot). "
          "expert_rows: received rows of every local expert.");
}

}  // namespace deep_moe
