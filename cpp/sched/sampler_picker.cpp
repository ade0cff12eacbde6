#include "sched/sampler_picker.h"

#include <utility>

#include "sample/chain.h"

namespace kqview {

namespace {

class sampler_picker final : public token_picker {
public:
    sampler_picker(const model& source, const sampling_params& params,
                   std::span<const token_id> prompt, std::unique_ptr<token_filter> filter)
        : n_vocab_(source.n_vocab()),
          sampler_(source.vocab(), params, llama_model_n_ctx_train(source.get()),
                   std::move(filter)) {
        sampler_.accept_prompt(prompt);
    }

    picked_token pick(float* logits) override {
        auto sampled = sampler_.sample(logits, n_vocab_);
        return {sampled.id, sampled.logprob, std::move(sampled.top)};
    }

    bool is_slow() const override { return sampler_.has_filter(); }
    void stop() noexcept override { sampler_.stop(); }

private:
    int n_vocab_;
    sampler sampler_;
};

}  // namespace

std::unique_ptr<token_picker> make_sampler_picker(const model& source,
                                                  const sampling_params& params,
                                                  std::span<const token_id> prompt,
                                                  std::unique_ptr<token_filter> filter) {
    return std::make_unique<sampler_picker>(source, params, prompt, std::move(filter));
}

}  // namespace kqview
