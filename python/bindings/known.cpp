// Objects kept for patterns that PyTorch's tensors hold.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "support.h"
#include "tensors.h"

namespace bindings {
namespace {

// Seconds of the clock that Python has as time.monotonic.
double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// When the patterns of a device are to be looked at for writes that PyTorch does not count, in seconds.
struct Clock {
    double due = 0;
};

// The use of a pattern by products that look for such writes: the clock of its device, and when it was last.
struct Use {
    explicit Use(std::shared_ptr<const Clock> clock) : clock(std::move(clock)) {}

    std::shared_ptr<const Clock> clock;
    double last = 0;
};

// The objects made for patterns, given as (crow_indices, col_indices, slot, shape, block_shape): on CUDA
// devices for as long as these tensors lie where they did and are not written to, on the CPU for as long as
// they hold what the object has copies of, which does not depend on who writes to them, and how.
class Known {
  public:
    explicit Known(const Tensors& tensors) : tensors_(tensors) {}

    // Returns the object of a pattern, or None. With `looking` also where its clock says that it is time for
    // a look.
    std::optional<nb::any> find(const AnyTuple& index, bool looking) {
        const auto found = objects_.find(key(index));
        State now;
        if (found == objects_.end() || !read(index, now)) return std::nullopt;
        const auto& [object, state, use] = found->second;
        if (!state.is_same(now)) return std::nullopt;
        if (looking && use) {
            const double time = seconds_now();
            if (time >= use->clock->due) return std::nullopt;
            use->last = time;
        }
        return object;
    }

    // `copies`: the addresses of the three copies that an object has on the CPU. `use`: null on the CPU.
    void keep(const AnyTuple& index, nb::any object, std::optional<std::array<uintptr_t, 3>> copies,
              std::shared_ptr<Use> use) {
        State state;
        forget(index);
        if (!read(index, state) || copies.has_value() != state.on_cpu) return;
        if (copies) state.at = *copies;
        objects_.emplace(key(index), Object{std::move(object), state, std::move(use)});
    }

    // To be called when one of the tensors is gone, with their `id` in place of them.
    void forget(const AnyTuple& ids) {
        const auto dropped = objects_.extract(key(ids));  // the end of an object may lead back here
    }

  private:
    struct State {
        std::array<uintptr_t, 3> at;  // where the tensors lie, or the copies on the CPU
        std::array<int64_t, 3> sizes;
        std::array<uint64_t, 3> versions;  // how often each was written to; not read on the CPU
        bool on_cpu;

        bool is_same(const State& now) const {
            if (sizes != now.sizes || on_cpu != now.on_cpu) return false;
            if (!on_cpu) return at == now.at && versions == now.versions;
            for (size_t i = 0; i < 3; ++i)
                if (!std::equal(pointer<int32_t>(at[i]), pointer<int32_t>(at[i]) + sizes[i],
                                pointer<int32_t>(now.at[i])))
                    return false;
            return true;
        }
    };

    struct Object {
        nb::any object;
        State state;
        std::shared_ptr<Use> use;
    };

    static Key key(const AnyTuple& index) {
        Key key;
        for (size_t i = 0; i < 3; ++i) {
            const nb::handle tensor = index[i];
            const bool is_id = PyLong_CheckExact(tensor.ptr());
            key.add(is_id ? nb::cast<int64_t>(tensor) : reinterpret_cast<int64_t>(tensor.ptr()));
        }
        for (size_t i = 3; i < 5; ++i) {
            const auto [rows, cols] = nb::cast<std::pair<int64_t, int64_t>>(index[i]);
            key.add(rows);
            key.add(cols);
        }
        return key;
    }

    // False for what is no index. Of tensors made in inference mode writes are not counted.
    bool read(const AnyTuple& index, State& state) const {
        state = {};
        for (size_t i = 0; i < 3; ++i) {
            const nb::handle object = index[i];
            dlpack::Tensor tensor;
            if (!tensors_.read(object, tensor) || tensor.dims != 1 || tensor.strides[0] != 1 ||
                tensor.dtype.bits != 32)
                return false;
            state.on_cpu = tensor.device_type == dlpack::cpu;
            state.at[i] = address(tensor);
            state.sizes[i] = tensor.sizes[0];
            if (!state.on_cpu) state.versions[i] = tensors_.read_version(object);
        }
        return true;
    }

    const Tensors& tensors_;
    std::unordered_map<Key, Object, KeyHash> objects_;
};

}  // namespace

void bind_tensors(nb::module_& m) {
    nb::class_<Tensors>(m, "Tensors")
        .def_rw("enabled", &Tensors::enabled)
        .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object>(), "exchange"_a.none(),
             "tensor_type"_a, "parameter_type"_a, "current_device"_a.none(), "tf32"_a);

    nb::class_<Clock>(m, "Clock").def(nb::init<>()).def_rw("due", &Clock::due);

    nb::class_<Use>(m, "Use")
        .def(nb::init<std::shared_ptr<const Clock>>(), "clock"_a)
        .def_rw("last", &Use::last);

    nb::class_<Known>(m, "Known")
        .def(nb::init<const Tensors&>(), nb::keep_alive<1, 2>(), "tensors"_a)
        .def("find", &Known::find, "index"_a, "looking"_a)
        .def("keep", &Known::keep, "index"_a, "object"_a, "copies"_a.none(), "use"_a.none())
        .def("forget", &Known::forget, "ids"_a);
}

}  // namespace bindings
