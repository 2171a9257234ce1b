"""A reward with verl's signature."""


def share_of_a(data_source, solution_str, ground_truth, extra_info=None):
    return {
        "score": solution_str.count("a") / max(len(solution_str), 1),
        "right": float(solution_str == ground_truth),
    }
