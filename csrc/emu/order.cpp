// Release, acquire, fences and barriers: how views (view.h) travel between threads.
#include "race.h"

namespace deep_moe::emu {

namespace {

void fence_async(Fiber* f, Proxy proxy) {
    Warp& warp = *f->warp;
    ViewRef &in = warp.fence_memo_in[u32(proxy)], &out = warp.fence_memo_out[u32(proxy)];
    if (!(in == f->view)) {
        in = f->view;
        out = f->world->sizes.copy(f->view);
        out->fence_async(proxy);
    }
    f->view = out;
    f->writes(proxy) = {warp.time++, false};
}

// What the lanes of a warp that has met have made visible to the async proxy.
void learn_fenced(View& v, const Warp& w, Proxy proxy) {
    u32 clean = 0, all_fenced = w.time;
    for (Fiber* f : w.lanes) {
        if (f->wait == Wait::Done) continue;
        OwnWrites& own = f->writes(proxy);
        if (own.dirty) {
            all_fenced = min_of(all_fenced, own.fenced);
        } else {
            clean |= 1u << f->lane;
            own.fenced = w.time;
        }
    }
    if (w.exited == 0) v.learn_all(proxy, w.agent, all_fenced);
    v.learn_lanes(proxy, w.agent, clean, w.time);
}

}  // namespace

void release_into(Fiber* f, ViewRef& target) {
    WorldImpl& w = *f->world;
    Warp& warp = *f->warp;
    w.sizes.join_into(target, f->view);
    View& v = w.sizes.writable(target);
    v.learn_lanes(Proxy::Generic, warp.agent, 1u << f->lane, warp.time);
    for (Proxy proxy : kAsyncProxies)
        v.learn_lanes(proxy, warp.agent, 1u << f->lane, f->writes(proxy).visible_until(warp.time));
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
    for (Proxy proxy : kAsyncProxies) fence_async(f, proxy);
}

void fence_async_shared(Fiber* f) { fence_async(f, Proxy::AsyncShared); }

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
        if (w->exited == 0)
            v.learn_all(Proxy::Generic, w->agent, w->time);
        else
            v.learn_lanes(Proxy::Generic, w->agent, ~w->exited, w->time);
        for (Proxy proxy : kAsyncProxies) learn_fenced(v, *w, proxy);
        ++w->time;
    }
    for (Warp* w = first; w < first + count; ++w)
        for (Fiber* f : w->lanes) {
            f->view = all;
            if (reads) f->reads = reads;
        }
}

}  // namespace deep_moe::emu
