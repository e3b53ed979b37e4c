"""Who computes what: iteration spaces, policies, plans. Knows no operator."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "CostModel": "cost_model",
        "Costs": "simulator",
        "DevicePlanner": "device_planner",
        "Plan": "plan",
        "Policy": "policies",
        "RaggedSpace": "space",
        "Status": "plan",
        "Timeline": "simulator",
        "UniformPlan": "plan",
        "capacity_of": "policies",
        "choose_num_shares": "cost_model",
        "expand": "uniform",
        "make_plan": "host_planner",
        "simulate": "simulator",
        "uniform_plan": "uniform",
        "uniform_space": "space",
    },
)
