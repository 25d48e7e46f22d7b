// Release, acquire, fences and barriers: how views (view.h) travel between threads.
#include "race.h"

namespace deep_moe::emu {

namespace {

// Up to when the thread's own writes are visible to the async proxy.
u32 fenced_until(const Fiber& f) { return f.dirty ? f.fenced : f.warp->time; }

}  // namespace

void release_into(Fiber* f, ViewRef& target) {
    WorldImpl& w = *f->world;
    Warp& warp = *f->warp;
    w.sizes.join_into(target, f->view);
    View& v = w.sizes.writable(target);
    v.learn_lanes(Proxy::Generic, warp.agent, 1u << f->lane, warp.time);
    v.learn_lanes(Proxy::Async, warp.agent, 1u << f->lane, fenced_until(*f));
    ++warp.time;
}

ViewRef released_view(Fiber* f) {
    ViewRef view;
    release_into(f, view);
    return view;
}

void acquire_view(Fiber* f, const ViewRef& view) {
    if (!view || view == f->view) return;
    Warp& warp = *f->warp;
    if (!(warp.memo_a == f->view && warp.memo_b == view)) {
        warp.memo_result = f->world->sizes.join(f->view, view);
        warp.memo_a = f->view;
        warp.memo_b = view;
    }
    f->view = warp.memo_result;
}

void fence_async(Fiber* f) {
    Warp& warp = *f->warp;
    if (!(warp.fence_memo_in == f->view)) {
        warp.fence_memo_in = f->view;
        warp.fence_memo_out = f->world->sizes.copy(f->view);
        warp.fence_memo_out->fence_async();
    }
    f->view = warp.fence_memo_out;
    f->fenced = warp.time++;
    f->dirty = false;
}

void meet(WorldImpl& world, Warp* first, u32 count) {
    ViewRef all, reads;
    const View* last = nullptr;
    for (Warp* w = first; w < first + count; ++w)
        for (Fiber* f : w->lanes) {
            if (f->wait == Wait::Done) continue;
            if (f->view.get() != last) {
                world.sizes.join_into(all, f->view);
                last = f->view.get();
            }
            if (f->reads) world.sizes.join_into(reads, f->reads);
        }
    View& v = world.sizes.writable(all);
    for (Warp* w = first; w < first + count; ++w) {
        u32 clean = 0, all_fenced = w->time;
        for (Fiber* f : w->lanes) {
            if (f->wait == Wait::Done) continue;
            if (f->dirty) {
                all_fenced = min_of(all_fenced, f->fenced);
            } else {
                clean |= 1u << f->lane;
                f->fenced = w->time;
            }
        }
        if (w->exited == 0) {
            v.learn_all(Proxy::Generic, w->agent, w->time);
            v.learn_all(Proxy::Async, w->agent, all_fenced);
        } else {
            v.learn_lanes(Proxy::Generic, w->agent, ~w->exited, w->time);
        }
        v.learn_lanes(Proxy::Async, w->agent, clean, w->time);
        ++w->time;
    }
    for (Warp* w = first; w < first + count; ++w)
        for (Fiber* f : w->lanes) {
            f->view = all;
            if (reads) f->reads = reads;
        }
}

}  // namespace deep_moe::emu
